"""Selects many transactions by a filter, for an act on all of them: check, decide, reissue."""

from dataclasses import replace

from pydantic import Field

from app.routers.transactions import filter_of
from app.runtime.state import Runtime
from app.schemas.fields import Id, Name, Strict, Time, Whole
from app.schemas.transactions import ID, Matched
from app.store.coordinator.transactions import TransactionSummary, list_transactions
from app.verdicts import State

MANY_MAX = 1000


class Many(Strict):
    """A filter. A transaction must match all of it."""

    producer_group: Name = Field(examples=["shop"])
    born_after: Time | None = Field(None, description="born at this time or later")
    born_before: Time | None = Field(None, description="born before this time")
    limit: Whole = Field(100, ge=1, le=MANY_MAX, description="the maximum number, newest first")
    transaction_ids: list[Id] | None = Field(
        None,
        min_length=1,
        max_length=MANY_MAX,
        description="only those of these that match the filter, such as the ones of a dry run; `limit` is not used",
        examples=[[ID]],
    )
    dry_run: bool = Field(True, strict=True, description="report what would change; send false to change it")


async def matching(
    runtime: Runtime, wanted: Many, state: State, *, reissued: bool | None = None
) -> tuple[list[TransactionSummary], bool]:
    """Return the transactions that match, newest first, and whether there may be more.

    `reissued` false: only those that were not reissued yet.
    """
    chosen = filter_of(
        runtime,
        producer_group=wanted.producer_group,
        state=state,
        born_after=wanted.born_after,
        born_before=wanted.born_before,
        reissued=reissued,
    )
    limit = wanted.limit
    if wanted.transaction_ids is not None:
        chosen, limit = replace(chosen, ids=tuple(wanted.transaction_ids)), len(wanted.transaction_ids)
    async with runtime.request_pool.connection() as connection:
        rows, cursor = await list_transactions(connection, chosen, limit)
    return rows, cursor is not None


def matched(rows: list[TransactionSummary], wanted: Many, changed: int, more: bool) -> Matched:
    """Return the answer of an act on many transactions."""
    return Matched(
        dry_run=wanted.dry_run,
        matched=len(rows),
        changed=changed,
        transaction_ids=[row.transaction_id for row in rows],
        more=more,
    )
