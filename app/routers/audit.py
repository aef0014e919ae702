"""`GET /audit`: the changes that people made."""

from datetime import datetime
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.errors import Invalid
from app.routers.dependencies import RuntimeDep, problems
from app.schemas.fields import Name, Strict, Time
from app.store.admin import audit
from app.store.admin.audit import AuditFilter, StoredAct

router = APIRouter(tags=["keys and audit"])

PAGE_MAX = 1000
ID_MAX = 2**31 - 1


class AuditQuery(Strict):
    """Filters of the list. A row must match all of them."""

    actor: Name | None = Field(None, description="the actor: a key's name, or a user of the command line")
    key_id: int | None = Field(None, ge=1, le=ID_MAX, description="with this key")
    what: Name | None = Field(None, description="of this kind", examples=["transaction.verdict"])
    target: Name | None = Field(None, description="done to this", examples=["shop"])
    after: Time | None = Field(None, description="at this time or later")
    before: Time | None = Field(None, description="before this time")
    cursor: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}$")] | None = Field(
        None, description="`next_cursor` of the page before"
    )
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="acts on a page")


class ActShown(BaseModel):
    """One change that a person made."""

    audit_id: int = Field(examples=[1030])
    at: datetime = Field(examples=["2026-11-21T08:00:00Z"])
    actor: str | None = Field(
        description="the key's name or the user of the command line; with auth off the name the caller gave, or null",
        examples=["dana"],
    )
    key_id: int | None = Field(description="null: auth was off, or no stored key was used", examples=[7])
    role: str | None = Field(description="the key's", examples=["operator"])
    what: str = Field(examples=["transaction.verdict"])
    target: str | None = Field(description="a name or an id", examples=["0193a7d6-a5c8-7b1e-8f00-1030a1030a10"])
    detail: dict[str, Any] = Field(
        description="the request, without bodies and secrets", examples=[{"verdict": "commit"}]
    )


class AuditPage(BaseModel):
    """A page of the audit, newest first."""

    items: list[ActShown]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")


@router.get("/audit", summary="List the changes that people made, newest first", responses=problems(Invalid))
async def get_audit(runtime: RuntimeDep, query: Annotated[AuditQuery, Query()]) -> AuditPage:
    """List every change that a person made by an operator's, admin's or subscriber's key, or by the command line.

    The audit row is written in the database transaction of the change. Some changes take several database transactions
    or share one with other requests: verdicts, dead letters by a filter, messages sent with an admin's key. Their audit
    row is written first, so every change has a row.
    """
    wanted = AuditFilter(
        below=audit.HIGHEST if query.cursor is None else int(query.cursor),
        target=query.target,
        actor=query.actor,
        key_id=query.key_id,
        what=query.what,
        after=query.after,
        before=query.before,
    )
    async with runtime.request_pool.connection() as connection:
        found = await audit.page(connection, wanted, query.limit + 1)
    items = [_shown(row) for row in found[: query.limit]]
    return AuditPage(items=items, next_cursor=str(items[-1].audit_id) if len(found) > query.limit else None)


def _shown(row: StoredAct) -> ActShown:
    return ActShown(
        audit_id=row.audit_id,
        at=row.at,
        actor=row.actor,
        key_id=row.key_id,
        role=row.role,
        what=row.what,
        target=row.target,
        detail=msgspec.json.decode(row.detail),
    )
