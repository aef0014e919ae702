"""`POST /end`: the producer's verdict, recorded once and for good."""

from collections.abc import Coroutine
from functools import partial
from typing import Any, NoReturn
from uuid import UUID

import msgspec

from app.checkback.claimed_checks import ClaimAnswer, settle_answers
from app.coordinator.decoding import decode
from app.coordinator.lane_call import Begun, JsonAnswer, LaneCall, completed
from app.coordinator.wire import EndAnswer, EndRequest, PublishedMessage, UnknownAnswer
from app.errors import DatabaseUnavailable, DayGone, Problem, TransactionUnknown, VerdictConflict, WrongGroup
from app.ids import message_id
from app.operations.audit import audit_entry
from app.permissions import Caller, Role
from app.runtime.state import Runtime
from app.store.admin.audit import Act, record
from app.store.checkback.requests import answer_unknown
from app.store.coordinator.ops import End, Recorded
from app.store.coordinator.transactions import transaction_state
from app.store.retention.days import day_of
from app.verdicts import SOURCE_WORDS, VERDICT_WORDS, DayState, Source, State, Verdict

_decoder = msgspec.json.Decoder(EndRequest)
_encode = msgspec.json.Encoder().encode
_VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}


def post_end(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> Begun:
    """Record a verdict: 200 after its commit and for a repeat, 202 for `unknown`.

    Raises Problem: Forbidden, decoding and the lane. The answer raises what `refusal` returns.
    """
    return end_begun(runtime, caller, decode(_decoder, body), trace)


def end_begun(runtime: Runtime, caller: Caller, request: EndRequest, trace: str | None) -> Begun:
    """Do the same for a decoded request."""
    if runtime.tracing is not None:
        runtime.tracing.about(trace, request.transaction_id, request.producer_group)
    if caller.role is Role.PRODUCER:
        caller.must_have_group(request.producer_group)
    if request.verdict == "unknown":
        return _unknown(runtime, caller, request)
    end = End(
        request.transaction_id,
        request.producer_group,
        _VERDICTS[request.verdict],
        Source.PRODUCER,
        reason=request.reason,
        from_check=request.from_check,
        traceparent=trace,
    )
    call = LaneCall(runtime.lanes.end, end, partial(_answer, runtime, caller, end))
    return call if caller.role is not Role.ADMIN else _noted(runtime, end_act(caller, request), call)


async def _noted(runtime: Runtime, act: Act, call: LaneCall[End, Recorded]) -> JsonAnswer:
    # The audit row comes before the flush, whose commit other requests share. So every verdict of a person has one.
    async with runtime.request_pool.connection() as connection:
        await record(connection, act, runtime.clock.now())
    return await completed(call)


def _answer(
    runtime: Runtime, caller: Caller, end: End, recorded: Recorded
) -> JsonAnswer | Coroutine[Any, Any, JsonAnswer]:
    if runtime.tracing is not None and recorded.owner == end.producer_group:
        runtime.tracing.link_half(end.traceparent, recorded.half_traceparent)
    if recorded.verdict != end.verdict or recorded.owner != end.producer_group:
        return _refused(runtime, caller, end, recorded)
    return 200, _encode(end_answer(end.transaction_id, recorded))


async def _refused(runtime: Runtime, caller: Caller, end: End, recorded: Recorded) -> NoReturn:
    if recorded.owner is not None and not caller.groups.takes(recorded.owner):
        # The same answer as for an unknown id: this key may not learn whether another group's transaction exists.
        raise await unknown_transaction(runtime, end.transaction_id)
    raise await refusal(runtime, end, recorded)


def end_answer(transaction_id: UUID, recorded: Recorded) -> EndAnswer:
    """Return the answer to an End whose verdict is recorded."""
    assert recorded.verdict is not None
    assert recorded.source is not None
    assert recorded.decided_at is not None
    return EndAnswer(
        transaction_id,
        VERDICT_WORDS[recorded.verdict],  # type: ignore[arg-type]
        SOURCE_WORDS[recorded.source],  # type: ignore[arg-type]
        recorded.decided_at,
        not recorded.fresh,
        published(transaction_id, recorded) if recorded.verdict == Verdict.COMMIT else None,
    )


def published(transaction_id: UUID, recorded: Recorded) -> list[PublishedMessage]:
    """Return a committed transaction's messages with their offsets."""
    return [
        PublishedMessage(message_id(transaction_id, message.position), message.topic, message.offset)
        for message in recorded.messages
    ]


async def refusal(runtime: Runtime, end: End, recorded: Recorded) -> Problem:
    """Return why an End is refused: no such half, a removed day, another group, or the opposite verdict."""
    if recorded.owner is None:
        return await unknown_transaction(runtime, end.transaction_id)
    if end.producer_group not in (None, recorded.owner):
        return WrongGroup("This transaction belongs to another producer group.")
    if recorded.verdict is None:
        if not recorded.open:
            return await unknown_transaction(runtime, end.transaction_id)
        # A crash between the two statements rolled back the winner of the race.
        return DatabaseUnavailable("The verdict could not be recorded now. Repeat the request.", retry_after_s=1)
    word = VERDICT_WORDS[recorded.verdict]
    hint = " To send its messages, POST /transactions/{id}/reissue." if word == "rollback" else ""
    assert recorded.source is not None
    return VerdictConflict(
        f"The transaction has the final verdict {word}.{hint}",
        recorded={"verdict": word, "source": SOURCE_WORDS[recorded.source], "decided_at": recorded.decided_at},
    )


async def unknown_transaction(runtime: Runtime, transaction_id: UUID) -> Problem:
    """Return the problem for an id without a half: its day was removed (410), or it is unknown (404)."""
    async with runtime.request_pool.connection() as connection:
        day = await day_of(connection, transaction_id)
    if day is None or day.state is DayState.OPEN:
        return TransactionUnknown(
            "No half with this transaction_id was ever acknowledged. Check the id, or post the half again."
        )
    where = f"it is archived at {day.archive}" if day.archive else "it was not archived"
    return DayGone(f"The transaction's day, {day.day}, was removed from the database; {where}.", archive=day.archive)


async def _unknown(runtime: Runtime, caller: Caller, request: EndRequest) -> tuple[int, bytes]:
    async with runtime.request_pool.connection() as connection:
        found = await transaction_state(connection, request.transaction_id)
    if found is not None and not caller.groups.takes(found.producer_group):
        found = None
    if found is not None and found.producer_group != request.producer_group:
        raise WrongGroup("This transaction belongs to another producer group.")
    if found is None:
        raise await unknown_transaction(runtime, request.transaction_id)
    state = found.state
    if request.from_check and state in (State.IN_DOUBT, State.PARKED):
        state = await _answer_check(runtime, caller, request, state)
    return 202, _encode(UnknownAnswer(request.transaction_id, "unknown", state.value))


async def _answer_check(runtime: Runtime, caller: Caller, request: EndRequest, state: State) -> State:
    """Count an `unknown` as the answer to the check that is out; return the state of its transaction after that."""
    act = end_act(caller, request) if caller.role is Role.ADMIN else None
    answer = ClaimAnswer(request.transaction_id, None, request.reason, None)
    act_of = None if act is None else lambda _: act
    settled = await settle_answers(runtime, request.producer_group, [answer], act_of)
    if settled:
        return settled[0].state
    if state is State.IN_DOUBT:
        now = runtime.clock.now()
        async with runtime.request_pool.connection() as connection:
            if act is not None:
                await record(connection, act, now)
            await answer_unknown(connection, request.transaction_id, now)
    return state


def end_act(caller: Caller, request: EndRequest) -> Act:
    """Return the audit row of a person's End."""
    return audit_entry(
        caller,
        "transaction.end",
        request.transaction_id,
        producer_group=request.producer_group,
        verdict=request.verdict,
        from_check=request.from_check or None,
        reason=request.reason,
    )
