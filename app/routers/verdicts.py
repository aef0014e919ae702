"""What a person does about undecided transactions: have them asked now, or decide them, one by one or by a filter.

Called by people (and by `halfnote transactions`), so every decision carries a reason and may carry who took it.
"""

import asyncio
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import AfterValidator, Field

from app.access import Caller
from app.acts import act, by_whom
from app.errors import (
    AlreadyDecided,
    DayGone,
    Invalid,
    OutcomeUnknown,
    Overloaded,
    TooEarly,
    TransactionUnknown,
    VerdictConflict,
)
from app.routers.end import end_answer, refusal, unknown_transaction
from app.routers.shared import CallerDep, Name, RuntimeDep, Strict, Time, Whole, problems
from app.routers.transactions import TransactionId, filter_of
from app.runtime import Runtime
from app.schemas import REASON_MAX
from app.shapes import CheckAsked, Matched
from app.store.audit import record
from app.store.check_back import ask_now
from app.store.ops import End
from app.store.transactions import Filter, TransactionSummary, list_transactions, transaction_state
from app.verdicts import Source, State, Verdict

router = APIRouter(prefix="/transactions", tags=["transactions"])

MANY_MAX = 1000
VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}

_encode = msgspec.json.Encoder().encode


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("NUL cannot be stored")
    return value


Reason = Annotated[
    str,
    Field(
        min_length=1,
        max_length=REASON_MAX,
        description="why, for whoever reads it later",
        examples=["the bank confirmed order 1030 by phone"],
        json_schema_extra={"pattern": r"^[^\u0000]*$"},
    ),
    AfterValidator(_storable),
]
Actor = Annotated[
    Name | None,
    Field(description="who decides; beside a key's name it is recorded as `erin (key dana)`", examples=["dana"]),
]


class VerdictRequest(Strict):
    """A person's verdict."""

    verdict: Literal["commit", "rollback"]
    reason: Reason
    actor: Actor = None
    force: bool = Field(False, strict=True, description="decide it although its producer may still be at work")


class Many(Strict):
    """A filter; all of it must be met."""

    producer_group: Name = Field(examples=["shop"])
    born_after: Time | None = Field(None, description="born at this time or later")
    born_before: Time | None = Field(None, description="born before this time")
    limit: Whole = Field(100, ge=1, le=MANY_MAX, description="how many at most, newest first")
    dry_run: bool = Field(True, strict=True, description="only tell what would be changed; send false to change it")


class CheckMany(Many):
    """Which transactions to ask about now."""

    state: Literal[State.HALF, State.IN_DOUBT, State.PARKED]


class DecideMany(Many):
    """Which transactions to decide, and how. Those in `half` are not for a filter: their producers are at work."""

    state: Literal[State.IN_DOUBT, State.PARKED]
    verdict: Literal["commit", "rollback"]
    reason: Reason
    actor: Actor = None


@router.post(
    "/{transaction_id:uuid}/check",
    status_code=202,
    summary="Ask the producer now",
    responses=problems(TransactionUnknown, AlreadyDecided, DayGone),
)
async def check_transaction(runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId) -> CheckAsked:
    """Make a transaction's check due at once, also before its check immunity is over, and also if it is parked.

    Send no body. A parked one stays parked whatever the answer, unless that is a verdict.
    """
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        asked = await ask_now(connection, transaction_id, now)
        if asked:
            await record(connection, act(caller, "transaction.check", transaction_id), now)
        standing = None if asked else await transaction_state(connection, transaction_id)
    if asked:
        return CheckAsked(transaction_id=transaction_id, next_check_at=now)
    if standing is None:
        raise await unknown_transaction(runtime, transaction_id)
    raise AlreadyDecided(f"The transaction is {standing.state}, for good.", state=standing.state)


@router.post(
    "/{transaction_id:uuid}/verdict",
    summary="Decide a transaction",
    response_class=Response,
    responses={
        200: {
            "description": "The verdict stands, on disk; `replayed` if it stood before",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EndAnswer"}}},
        },
        **problems(TransactionUnknown, TooEarly, VerdictConflict, DayGone, OutcomeUnknown, Overloaded),
    },
)
async def decide_transaction(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, wanted: VerdictRequest
) -> Response:
    """Record a person's verdict, with source `operator`. It is as final as any other.

    A transaction in state `half` is refused (`too-early`) unless `force`: its producer may still be at work.
    """
    if not wanted.force:
        async with runtime.database.connection() as connection:
            standing = await transaction_state(connection, transaction_id)
        if standing is not None and standing.state is State.HALF:
            raise TooEarly(
                "The transaction is not in doubt yet; send `force` to decide it all the same.",
                first_check_at=standing.first_check_at,
            )
    verdict = VERDICTS[wanted.verdict]
    await _note(runtime, caller, wanted, [transaction_id])
    end = End(transaction_id, None, verdict, Source.OPERATOR, actor=by_whom(caller, wanted.actor), reason=wanted.reason)
    recorded = await runtime.lanes.end.submit(end)
    if recorded.verdict != verdict:
        raise await refusal(runtime, end, recorded)
    return Response(_encode(end_answer(transaction_id, recorded)), media_type="application/json")


@router.post("/check", summary="Ask about many transactions now", responses=problems(Invalid))
async def check_transactions(runtime: RuntimeDep, caller: CallerDep, wanted: CheckMany) -> Matched:
    """Make the checks of the transactions that meet a filter due at once.

    `dry_run` is true unless you say otherwise: first see which ones would be asked about.
    """
    rows, more = await _matching(runtime, wanted, wanted.state)
    changed = 0
    if not wanted.dry_run:
        now = runtime.clock.now()
        async with runtime.database.transaction() as connection:
            # In the order of ids, so that two calls never wait for each other in turn.
            for transaction_id in sorted(row.transaction_id for row in rows):
                if await ask_now(connection, transaction_id, now):
                    changed += 1
                    await record(connection, act(caller, "transaction.check", transaction_id), now)
    return _matched(rows, wanted, changed, more)


@router.post("/verdict", summary="Decide many transactions", responses=problems(Invalid, OutcomeUnknown, Overloaded))
async def decide_transactions(runtime: RuntimeDep, caller: CallerDep, wanted: DecideMany) -> Matched:
    """Record one verdict for every transaction that meets a filter; those decided meanwhile stay as they are.

    `dry_run` is true unless you say otherwise: a verdict is for good, so first see which ones it would decide. After a
    503 some may have been decided; the same call again decides the rest.
    """
    rows, more = await _matching(runtime, wanted, wanted.state)
    changed = 0
    if not wanted.dry_run:
        verdict, actor = VERDICTS[wanted.verdict], by_whom(caller, wanted.actor)
        await _note(runtime, caller, wanted, [row.transaction_id for row in rows])
        ends = [
            End(row.transaction_id, None, verdict, Source.OPERATOR, actor=actor, reason=wanted.reason) for row in rows
        ]
        changed = await _decide(runtime, ends)
    return _matched(rows, wanted, changed, more)


async def _note(
    runtime: Runtime, caller: Caller, wanted: VerdictRequest | DecideMany, transaction_ids: list[UUID]
) -> None:
    """Put verdicts on record before they are asked for: they are flushed with others, in a commit of their own.

    So no verdict of a person is without its act; one that was refused afterwards has one as well.
    """
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        for one in transaction_ids:
            said = act(
                caller,
                "transaction.verdict",
                one,
                actor=wanted.actor,
                verdict=wanted.verdict,
                reason=wanted.reason,
            )
            await record(connection, said, now)


async def _matching(runtime: Runtime, wanted: Many, state: State) -> tuple[list[TransactionSummary], bool]:
    chosen: Filter = filter_of(
        runtime,
        producer_group=wanted.producer_group,
        state=state,
        born_after=wanted.born_after,
        born_before=wanted.born_before,
    )
    async with runtime.database.connection() as connection:
        rows, cursor = await list_transactions(connection, chosen, wanted.limit)
    return rows, cursor is not None


async def _decide(runtime: Runtime, ends: list[End]) -> int:
    """Record all of them and return how many this call decided; the first refusal is raised after all were tried."""

    async def one(end: End) -> bool:
        return (await runtime.lanes.end.submit(end)).fresh

    outcomes = await asyncio.gather(*map(one, ends), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return sum(outcome is True for outcome in outcomes)


def _matched(rows: list[TransactionSummary], wanted: Many, changed: int, more: bool) -> Matched:
    return Matched(
        dry_run=wanted.dry_run,
        matched=len(rows),
        changed=changed,
        transaction_ids=[row.transaction_id for row in rows],
        more=more,
    )
