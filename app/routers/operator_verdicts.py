"""Calls on undecided transactions: check now, or decide; one by one or by a filter.

People and `halfnote transactions` use these calls, and producers ask for checks of their own transactions. Every
decision has a reason and can name its actor.
"""

import asyncio
from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from app.database.connection import Connection
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
from app.operations.audit import acting_person, audit_entry
from app.permissions import Caller, Role
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import end_answer, refusal, unknown_transaction
from app.routers.transaction_selection import Many, matched, matching
from app.routers.transactions import TransactionId
from app.runtime.state import Runtime
from app.schemas.fields import ActNote, Actor, Reason, Strict
from app.schemas.transactions import CheckAsked, Matched
from app.store.admin.audit import record_all
from app.store.checkback.producer_groups import held_until
from app.store.checkback.requests import ask_all_now
from app.store.coordinator.ops import End
from app.store.coordinator.transactions import transaction_state
from app.verdicts import Source, State, Verdict

router = APIRouter(prefix="/transactions", tags=["transactions"])

VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}

_encode = msgspec.json.Encoder().encode


class VerdictRequest(Strict):
    """A person's verdict."""

    verdict: Literal["commit", "rollback"]
    reason: Reason
    actor: Actor = None
    force: bool = Field(False, strict=True, description="decide it even while its producer may still be working")


class CheckMany(Many):
    """Selects the transactions to check now."""

    state: Literal["half", "in_doubt", "parked"]


class DecideMany(Many):
    """Selects the transactions to decide, and the verdict. State `half` is excluded: those producers still work."""

    state: Literal["in_doubt", "parked"]
    verdict: Literal["commit", "rollback"]
    reason: Reason
    actor: Actor = None


@router.post(
    "/{transaction_id:uuid}/check",
    status_code=202,
    summary="Ask the producer now",
    responses=problems(TransactionUnknown, AlreadyDecided, DayGone),
)
async def check_transaction(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, note: Annotated[ActNote, Query()]
) -> CheckAsked:
    """Make a transaction's check due at once, even during its check immunity and even if it is parked.

    Send no body. A parked transaction stays parked unless the answer is a verdict. While its producer group has asked
    for no checks (`Retry-After`), the answer has `held_until`, and the check is sent then; a PUT of the group ends the
    pause. A producer's key may ask for checks of its own groups' transactions.
    """
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        standing = await transaction_state(connection, transaction_id)
        if standing is not None and not caller.groups.takes(standing.producer_group):
            # The same answer as for an unknown id.
            standing = None
        asked = standing is not None and bool(await _ask(connection, caller, [transaction_id], note, now))
        if standing is not None and not asked:
            # It may have been decided after the first look.
            standing = await transaction_state(connection, transaction_id)
        held = await held_until(connection, standing.producer_group, now) if standing is not None and asked else None
    if asked:
        return CheckAsked(transaction_id=transaction_id, next_check_at=held or now, held_until=held)
    if standing is None:
        raise await unknown_transaction(runtime, transaction_id)
    raise AlreadyDecided(f"The transaction is {standing.state}. A verdict is final.", state=standing.state)


@router.post(
    "/{transaction_id:uuid}/verdict",
    summary="Decide a transaction",
    response_class=Response,
    responses={
        200: {
            "description": "The verdict is on disk; `replayed` is true if it was recorded before",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EndAnswer"}}},
        },
        **problems(TransactionUnknown, TooEarly, VerdictConflict, DayGone, OutcomeUnknown, Overloaded),
    },
)
async def decide_transaction(
    runtime: RuntimeDep, caller: CallerDep, transaction_id: TransactionId, wanted: VerdictRequest
) -> Response:
    """Record a person's verdict, with source `operator`. It is as final as any other.

    A transaction in state `half` is refused (`too-early`) unless `force` is true: its producer may still be working.
    """
    async with runtime.request_pool.connection() as connection:
        standing = await transaction_state(connection, transaction_id)
    if standing is None:
        # Before the audit row: the nightly proof looks for the transaction of each verdict that the audit names.
        raise await unknown_transaction(runtime, transaction_id)
    if standing.state is State.HALF and not wanted.force:
        raise TooEarly(
            "The transaction is not in doubt yet. Wait for its producer, or send `force: true` to decide it now.",
            first_check_at=standing.first_check_at,
        )
    verdict = VERDICTS[wanted.verdict]
    await _note(runtime, caller, wanted, [transaction_id])
    end = End(
        transaction_id, None, verdict, Source.OPERATOR, actor=acting_person(caller, wanted.actor), reason=wanted.reason
    )
    recorded = await runtime.lanes.end.enqueue(end)
    if recorded.verdict != verdict:
        raise await refusal(runtime, end, recorded)
    return Response(_encode(end_answer(transaction_id, recorded)), media_type="application/json")


@router.post("/check", summary="Check many transactions now", responses=problems(Invalid))
async def check_transactions(
    runtime: RuntimeDep, caller: CallerDep, wanted: CheckMany, note: Annotated[ActNote, Query()]
) -> Matched:
    """Make the checks of all transactions that match a filter due at once.

    `dry_run` defaults to true, so that the first call shows which transactions would be checked. To check no others,
    send its `transaction_ids`.
    """
    rows, more = await matching(runtime, wanted, State(wanted.state))
    changed = 0
    if not wanted.dry_run:
        now = runtime.clock.now()
        async with runtime.request_pool.transaction() as connection:
            changed = await _ask(connection, caller, [row.transaction_id for row in rows], note, now)
    return matched(rows, wanted, changed, more)


@router.post("/verdict", summary="Decide many transactions", responses=problems(Invalid, OutcomeUnknown, Overloaded))
async def decide_transactions(runtime: RuntimeDep, caller: CallerDep, wanted: DecideMany) -> Matched:
    """Record one verdict for every transaction that matches a filter. Transactions decided meanwhile do not change.

    `dry_run` defaults to true, because a verdict is final: the first call shows which transactions it would decide. To
    decide no others, send its `transaction_ids`.
    After a 503 some may have been decided. Repeating the call decides the rest.
    """
    rows, more = await matching(runtime, wanted, State(wanted.state))
    changed = 0
    if not wanted.dry_run:
        verdict, actor = VERDICTS[wanted.verdict], acting_person(caller, wanted.actor)
        await _note(runtime, caller, wanted, [row.transaction_id for row in rows])
        ends = [
            End(row.transaction_id, None, verdict, Source.OPERATOR, actor=actor, reason=wanted.reason) for row in rows
        ]
        changed = await _decide(runtime, ends)
    return matched(rows, wanted, changed, more)


async def _ask(
    connection: Connection, caller: Caller, transaction_ids: list[UUID], note: ActNote, now: datetime
) -> int:
    """Make the checks of transactions due at once, with audit rows unless a producer asked.

    Return how many; those that are decided are left out.
    """
    asked = await ask_all_now(connection, transaction_ids, now)
    if caller.role is not Role.PRODUCER:
        acts = [audit_entry(caller, "transaction.check", one, actor=note.actor, reason=note.reason) for one in asked]
        await record_all(connection, acts, now)
    return len(asked)


async def _note(
    runtime: Runtime, caller: Caller, wanted: VerdictRequest | DecideMany, transaction_ids: list[UUID]
) -> None:
    """Write the audit rows of verdicts before the verdicts are flushed, in a commit of their own.

    So every verdict of a person has an audit row. A verdict that is refused afterwards has one as well.
    """
    now = runtime.clock.now()
    said = {"actor": wanted.actor, "verdict": wanted.verdict, "reason": wanted.reason}
    acts = [audit_entry(caller, "transaction.verdict", one, **said) for one in transaction_ids]
    async with runtime.request_pool.transaction() as connection:
        await record_all(connection, acts, now)


async def _decide(runtime: Runtime, ends: list[End]) -> int:
    """Record all Ends and return how many this call decided. Raises the first refusal after all were tried."""

    async def one(end: End) -> bool:
        return (await runtime.lanes.end.enqueue(end)).fresh

    outcomes = await asyncio.gather(*map(one, ends), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return sum(outcome is True for outcome in outcomes)
