"""`GET /audit` and `GET /audit/chain`: the changes that people made, and the digests that chain them."""

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from app.errors import Invalid
from app.routers.dependencies import RuntimeDep, problems
from app.schemas.fields import COUNT, Name, Strict, Time
from app.schemas.totals import COUNTED_MOST, TOTAL, TotalShown, total_of
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
    sort: Literal["newest", "oldest"] = Field("newest", description="newest or oldest first")
    count: bool = Field(False, description=COUNT)


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
    """A page of the audit."""

    items: list[ActShown]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    total: TotalShown | None = Field(None, description=TOTAL)


class ChainQuery(Strict):
    """A part of the chain."""

    cursor: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,17}$")] | None = Field(
        None, description="`next_cursor` of the page before"
    )
    limit: int = Field(PAGE_MAX, ge=1, le=PAGE_MAX, description="rows on a page")


class ChainRow(BaseModel):
    """One row of the audit in its chain."""

    place: int = Field(description="from 1, without a gap", examples=[1030])
    digest: str = Field(
        description="SHA-256 in hex of `[`, `place`, `, `, the digest before it in quotes, `, ` and `content`",
        examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"],
    )
    content: str = Field(
        description="audit_id, at, actor, key_id, role, what, target and detail, as the rest of a JSON array",
        examples=['7, "2026-11-21T08:00:00.000000", "dana", 7, "operator", "topic.declare", "order", {}]'],
    )


class ChainEnd(BaseModel):
    """A place of the chain and its digest."""

    place: int = Field(examples=[1030])
    digest: str = Field(examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])


class ChainPage(BaseModel):
    """A page of the chain, oldest first, and what the database says of the whole chain."""

    items: list[ChainRow]
    next_cursor: str | None = Field(description="send it as `cursor` for the next page; null: this was the last")
    begins_after: ChainEnd | None = Field(
        description="the last row that was removed because of its age; place 0 if there was none; null: unknown"
    )
    head: ChainEnd | None = Field(description="the last row; null: unknown, which is a fault")
    unchained: int = Field(description="rows without a place that are later than the first with one: a fault", ge=0)
    kept_s: int = Field(description="how long rows are kept before they are removed, in seconds", examples=[34_560_000])


@router.get("/audit", summary="List the changes that people made", responses=problems(Invalid))
async def get_audit(runtime: RuntimeDep, query: Annotated[AuditQuery, Query()]) -> AuditPage:
    """List every change that a person made by an operator's, admin's or subscriber's key, or by the command line.

    The audit row is written in the database transaction of the change. Some changes take several database transactions
    or share one with other requests: verdicts, dead letters by a filter, messages sent with an admin's key. Their audit
    row is written first, so every change has a row. With `count` the answer has the number of all that match.
    """
    whole = AuditFilter(
        target=query.target,
        actor=query.actor,
        key_id=query.key_id,
        what=query.what,
        after=query.after,
        before=query.before,
    )
    oldest_first, wanted = query.sort == "oldest", whole
    if query.cursor is not None:
        place = int(query.cursor)
        wanted = replace(whole, above=place) if oldest_first else replace(whole, below=place)
    async with runtime.request_pool.connection() as connection:
        found = await audit.page(connection, wanted, query.limit + 1, oldest_first=oldest_first)
        total = await audit.count_acts(connection, whole, COUNTED_MOST + 1) if query.count else None
    items = [_shown(row) for row in found[: query.limit]]
    return AuditPage(
        items=items,
        next_cursor=str(items[-1].audit_id) if len(found) > query.limit else None,
        total=None if total is None else total_of(total),
    )


@router.get("/audit/chain", summary="List the digests of the audit, oldest first", responses=problems(Invalid))
async def get_audit_chain(runtime: RuntimeDep, query: Annotated[ChainQuery, Query()]) -> ChainPage:
    """List the chain of the audit with the text that each digest covers, so that a caller can compute all digests.

    `halfnote audit verify` does it. The service compares nothing here.
    """
    after = 0 if query.cursor is None else int(query.cursor)
    # One snapshot: rows that upkeep removes between two reads would be missing.
    async with (
        runtime.request_pool.connection() as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        ends = await audit.chain_ends(connection)
        rows = await audit.chained(connection, after, query.limit + 1)
    items = [ChainRow(place=row.place, digest=row.digest, content=row.content) for row in rows[: query.limit]]
    return ChainPage(
        items=items,
        next_cursor=str(items[-1].place) if len(rows) > query.limit else None,
        begins_after=_end(ends.forgotten_place, ends.forgotten_digest),
        head=_end(ends.place, ends.digest),
        unchained=ends.unchained,
        kept_s=runtime.settings.audit_keep_s,
    )


def _end(place: int | None, digest: str | None) -> ChainEnd | None:
    return None if place is None or digest is None else ChainEnd(place=place, digest=digest)


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
