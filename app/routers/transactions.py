"""`GET /transactions` and `GET /transactions/{id}`: states and timelines of transactions."""

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Path, Query
from pydantic import Field

from app.errors import DayGone, Forbidden, Invalid, TransactionUnknown
from app.ids import lowest_id
from app.permissions import Role
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import unknown_transaction
from app.routers.timeline import attempt_entry, known, transaction_shown
from app.runtime.state import Runtime
from app.schemas.fields import COUNT, Id, Name, Strict, Time
from app.schemas.totals import COUNTED_MOST, TotalShown
from app.schemas.transactions import (
    ID,
    AttemptPage,
    LastCheck,
    SourceWord,
    TransactionPage,
    TransactionRow,
    TransactionShown,
)
from app.store.coordinator.attempts import HIGHEST_ID, earlier_attempts, last_checks
from app.store.coordinator.history import read_history, read_owner
from app.store.coordinator.transactions import (
    HIGHEST,
    LOWEST,
    TransactionFilter,
    TransactionSummary,
    count_transactions,
    list_transactions,
)
from app.verdicts import CheckOutcome, Source, State

router = APIRouter(prefix="/transactions", tags=["transactions"])

PAGE_MAX = 1000
# The time in an id and `born_at` differ by the skew allowed for a new id plus the longest wait in the queue.
QUEUE_S = 60

TransactionId = Annotated[UUID, Path(description="the transaction's id, a UUIDv7", examples=[ID])]


class TransactionQuery(Strict):
    """Filters of the list. A transaction must match all of them."""

    producer_group: Name | None = Field(None, description="of this producer group", examples=["shop"])
    state: State | None = Field(None, description="standing here now")
    source: SourceWord | None = Field(None, description="decided by the producer, a check, policy or a person")
    refused_end: bool | None = Field(
        None, description="true: an end that came after another verdict was refused; false: none was"
    )
    reissued: bool | None = Field(None, description="true: reissued as another transaction; false: not reissued")
    topic: Name | None = Field(None, description="with a message on this topic", examples=["order"])
    key: Name | None = Field(None, description="with a message of this key", examples=["order-1030"])
    born_after: Time | None = Field(None, description="born at this time or later")
    born_before: Time | None = Field(None, description="born before this time")
    sort: Literal["newest", "oldest"] = Field("newest", description="by the time of the ids; `oldest`: oldest first")
    count: bool = Field(False, description=COUNT)
    cursor: Id | None = Field(None, description="`next_cursor` of the previous page, with the same order")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="transactions on a page")


@router.get(
    "",
    summary="List transactions",
    response_model_exclude_unset=True,
    responses=problems(Invalid),
)
async def list_of_transactions(
    runtime: RuntimeDep, caller: CallerDep, query: Annotated[TransactionQuery, Query()]
) -> TransactionPage:
    """Return a page of transactions by id, newest first or oldest first.

    The time to answer is bounded, also that of `count`. If few transactions match the filter, a page may hold fewer
    than `limit` or none and still have a `next_cursor`. The list ends when `next_cursor` is null. A producer's key
    must name one of its groups.
    """
    if caller.role is Role.PRODUCER:
        if query.producer_group is None:
            raise Forbidden(
                "A producer's key lists the transactions of one of its groups: send `producer_group`.",
                role=caller.role,
                missing={"groups": "*"},
            )
        caller.must_have_group(query.producer_group)
    oldest_first = query.sort == "oldest"
    whole = filter_of(
        runtime,
        producer_group=query.producer_group,
        state=query.state,
        topic=query.topic,
        key=query.key,
        born_after=query.born_after,
        born_before=query.born_before,
        source=query.source,
        refused_end=query.refused_end,
        reissued=query.reissued,
    )
    wanted = whole if query.cursor is None else whole.beyond(query.cursor, oldest_first=oldest_first)
    async with runtime.request_pool.connection() as connection:
        rows, cursor = await list_transactions(connection, wanted, query.limit, oldest_first=oldest_first)
        counted = None
        if query.count and len(rows) < query.limit and query.cursor is None:
            # The only page; or a first one that ended early, since the filter matches too rarely to be counted in time.
            counted = len(rows), cursor is None
        elif query.count:
            counted = await count_transactions(connection, whole, COUNTED_MOST)
        asked = [row.transaction_id for row in rows if row.check_back is not None and row.verdict is None]
        checks = await last_checks(connection, asked) if asked else {}
    items = [_row(row, checks.get(row.transaction_id)) for row in rows]
    # An answer without a count leaves the field out.
    total = {} if counted is None else {"total": TotalShown(count=counted[0], exact=counted[1])}
    return TransactionPage(items=items, next_cursor=cursor, **total)


class AttemptQuery(Strict):
    """Selects a page of a transaction's attempts."""

    cursor: int | None = Field(None, ge=0, le=HIGHEST_ID, description="`attempts_cursor` or `next_cursor`")
    limit: int = Field(
        100, ge=1, le=PAGE_MAX, description="attempts on a page; HALFNOTE_ATTEMPTS_PAGE_MAX also limits it"
    )


@router.get(
    "/{transaction_id:uuid}",
    summary="Show a transaction's state and timeline",
    response_model_exclude_unset=True,
    responses=problems(TransactionUnknown, DayGone),
)
async def get_transaction(runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId) -> TransactionShown:
    """Return a transaction's state, messages and timeline from one snapshot.

    If `attempts_cursor` is not null, earlier attempts are at `/transactions/{id}/attempts`. The messages have their
    first 1,000 deliveries together; if `deliveries_cursor` is not null, the others are at
    `/transactions/{id}/deliveries`.
    """
    async with runtime.request_pool.connection() as connection:
        owner = await read_owner(connection, transaction_id)
        # The scope is judged first: reading another group's history would show by its time that the id exists.
        in_scope = owner is not None and caller.groups.takes(owner.producer_group)
        limit = runtime.settings.attempts_page_max
        history = await read_history(connection, transaction_id, limit) if in_scope else None
    if history is None:
        raise await unknown_transaction(runtime, transaction_id)
    return transaction_shown(history, caller)


@router.get(
    "/{transaction_id:uuid}/attempts",
    summary="List a transaction's attempts, latest first",
    response_model_exclude_unset=True,
    responses=problems(Invalid, TransactionUnknown, DayGone),
)
async def list_of_attempts(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, query: Annotated[AttemptQuery, Query()]
) -> AttemptPage:
    """Return a page of the checks, the failed attempts of deliveries and the refused ends of a transaction.

    They are entries as in the timeline. The list ends when `next_cursor` is null.
    """
    limit = min(query.limit, runtime.settings.attempts_page_max)
    below = HIGHEST_ID if query.cursor is None else query.cursor
    async with runtime.request_pool.connection() as connection:
        owner = await read_owner(connection, transaction_id)
        # The scope is judged first, as in `get_transaction`.
        in_scope = owner is not None and caller.groups.takes(owner.producer_group)
        page = await earlier_attempts(connection, transaction_id, below, limit) if in_scope else None
    if page is None:
        raise await unknown_transaction(runtime, transaction_id)
    found, cursor = page
    return AttemptPage(
        items=[attempt_entry(transaction_id, one) for one in found], next_cursor=None if cursor is None else str(cursor)
    )


def filter_of(
    runtime: Runtime,
    *,
    producer_group: str | None,
    state: State | None,
    topic: str | None = None,
    key: str | None = None,
    born_after: datetime | None,
    born_before: datetime | None,
    source: str | None = None,
    refused_end: bool | None = None,
    reissued: bool | None = None,
) -> TransactionFilter:
    """Return the filter of a list. A range of birth times also bounds the ids, and so the days to read."""
    margin_s = runtime.settings.id_skew_s + QUEUE_S
    low = LOWEST if born_after is None else lowest_id(born_after, -margin_s)
    high = HIGHEST if born_before is None else lowest_id(born_before, margin_s)
    return TransactionFilter(
        low=low,
        high=high,
        producer_group=producer_group,
        topic=topic,
        key=key,
        state=state,
        born_after=born_after,
        born_before=born_before,
        decided_by=None if source is None else Source[source.upper()],
        has_refused_end=refused_end,
        is_reissued=reissued,
    )


def _row(row: TransactionSummary, last_check: tuple[datetime, CheckOutcome] | None) -> TransactionRow:
    return TransactionRow(
        transaction_id=row.transaction_id,
        producer_group=row.producer_group,
        state=row.state,
        born_at=row.born_at,
        topic=row.topic,
        key=row.key,
        message_count=row.message_count,
        **known(
            verdict=None if row.verdict is None else row.verdict.word,
            source=None if row.source is None else Source(row.source).word,
            decided_at=row.decided_at,
            next_check_at=row.next_check_at,
            parked_reason=row.parked_reason if row.state is State.PARKED else None,
            last_check=None if last_check is None else LastCheck(at=last_check[0], outcome=last_check[1]),
        ),
    )
