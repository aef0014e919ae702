"""The API keys, and the changes that people made."""

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.api_keys import ApiKeyQuery, list_api_keys
from app.routers.audit import AuditQuery, get_audit

_ROWS, _CSV_ROWS = 50, 1000
_KEY_COLUMNS = ("key_id", "name", "prefix", "role", "created_at", "created_by", "expires_at", "revoked_at")
_AUDIT_COLUMNS = ("audit_id", "at", "actor", "key_id", "role", "what", "target", "detail")


async def show_keys(visit: Visit) -> Response:
    """Show a page of API keys, newest first."""
    query = visit.query(ApiKeyQuery, limit=_CSV_ROWS if visit.wants_csv else _ROWS)
    found = await list_api_keys(visit.runtime, query)
    if visit.wants_csv:
        rows = ([getattr(one, name) for name in _KEY_COLUMNS] for one in found.items)
        return visit.csv("keys", _KEY_COLUMNS, rows)
    return visit.page(
        "keys.html",
        rows=found.items,
        next_cursor=found.next_cursor,
        command_shown=command("keys", "list"),
        now=visit.runtime.clock.now(),
    )


async def show_audit(visit: Visit) -> Response:
    """Show a page of the audit, newest first."""
    query = visit.query(AuditQuery, limit=_CSV_ROWS if visit.wants_csv else _ROWS)
    found = await get_audit(visit.runtime, query)
    if visit.wants_csv:
        rows = ([getattr(one, name) for name in _AUDIT_COLUMNS] for one in found.items)
        return visit.csv("audit", _AUDIT_COLUMNS, rows)
    asked = query.model_dump(exclude={"limit", "cursor", "key_id"}, exclude_none=True)
    return visit.page(
        "audit.html",
        query=query,
        rows=found.items,
        next_cursor=found.next_cursor,
        command_shown=command("audit", **asked),
        now=visit.runtime.clock.now(),
    )


PAGES = [
    Page("GET", "/console/keys", show_keys, ("GET", "/api-keys")),
    Page("GET", "/console/audit", show_audit, ("GET", "/audit")),
]
