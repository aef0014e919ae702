"""The API keys, and the changes that people made."""

from functools import partial
from typing import Any

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.api_keys import ApiKeyQuery, list_api_keys
from app.routers.audit import AuditQuery, get_audit

_KEY_COLUMNS = ("key_id", "name", "prefix", "role", "created_at", "created_by", "expires_at", "revoked_at")
_AUDIT_COLUMNS = ("audit_id", "at", "actor", "key_id", "role", "what", "target", "detail")


async def show_keys(visit: Visit) -> Response:
    """Show a page of API keys."""
    query = visit.list_query(ApiKeyQuery, count=True)
    read = partial(list_api_keys, visit.runtime)
    if visit.wants_csv:
        return await visit.csv_of_list("keys", _KEY_COLUMNS, query, read)
    found = await read(query)
    return visit.page(
        "keys.html",
        rows=found.items,
        next_cursor=found.next_cursor,
        sort=query.sort,
        total=found.total,
        command_shown=command("keys", "list", sort=None if query.sort == "newest" else query.sort),
        now=visit.runtime.clock.now(),
    )


async def show_audit(visit: Visit) -> Response:
    """Show a page of the audit."""
    query = visit.list_query(AuditQuery, count=True)
    read = partial(get_audit, visit.runtime)
    if visit.wants_csv:
        return await visit.csv_of_list("audit", _AUDIT_COLUMNS, query, read)
    found = await read(query)
    asked = query.model_dump(exclude={"limit", "cursor", "key_id", "count"}, exclude_none=True, exclude_defaults=True)
    # The command line has no filter by key.
    shown: dict[str, Any] = {} if query.key_id else {"command_shown": command("audit", **asked)}
    return visit.page(
        "audit.html",
        query=query,
        rows=found.items,
        sort=query.sort,
        total=found.total,
        next_cursor=found.next_cursor,
        now=visit.runtime.clock.now(),
        **shown,
    )


PAGES = [
    Page("GET", "/console/keys", show_keys, ("GET", "/api-keys")),
    Page("GET", "/console/audit", show_audit, ("GET", "/audit")),
]
