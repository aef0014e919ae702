"""`POST /end`: the producer's verdict, recorded once and for good."""

from uuid import UUID

import msgspec

from app.access import Caller, Role
from app.acts import act
from app.decoding import decode
from app.errors import DatabaseUnavailable, DayGone, Problem, TransactionUnknown, VerdictConflict, WrongGroup
from app.ids import message_id
from app.runtime import Runtime
from app.schemas import EndAnswer, EndRequest, PublishedMessage, UnknownAnswer
from app.store.audit import Act, record
from app.store.check_back import answer_unknown
from app.store.days import day_of
from app.store.ops import End, Recorded
from app.store.transactions import transaction_state
from app.verdicts import SOURCE_WORDS, VERDICT_WORDS, Source, State, Verdict

_decoder = msgspec.json.Decoder(EndRequest)
_encode = msgspec.json.Encoder().encode
_VERDICTS = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}


async def post_end(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> tuple[int, bytes]:
    """Record a verdict: 200 after its commit (also for a repeat), 202 for `unknown`. Raises what `refusal` returns."""
    request = decode(_decoder, body)
    if runtime.tracing is not None:
        runtime.tracing.about(trace, request.transaction_id, request.producer_group)
    if caller.role is Role.PRODUCER:
        caller.must_have_group(request.producer_group)
    if request.verdict == "unknown":
        return await _unknown(runtime, caller, request)
    verdict = _VERDICTS[request.verdict]
    end = End(
        request.transaction_id,
        request.producer_group,
        verdict,
        Source.PRODUCER,
        reason=request.reason,
        from_check=request.from_check,
        traceparent=trace,
    )
    if caller.role is Role.ADMIN:
        # Before the flush, whose commit is others' as well; so no verdict that a person sent is without its act.
        async with runtime.database.connection() as connection:
            await record(connection, _act(caller, request), runtime.clock.now())
    recorded = await runtime.lanes.end.ask(end)
    if recorded.verdict != verdict or recorded.owner != request.producer_group:
        if recorded.owner is not None and not caller.groups.takes(recorded.owner):
            # As an id that never was: whether another's transaction exists is nothing that this key may ask.
            raise await unknown_transaction(runtime, end.transaction_id)
        raise await refusal(runtime, end, recorded)
    return 200, _encode(end_answer(request.transaction_id, recorded))


def end_answer(transaction_id: UUID, recorded: Recorded) -> EndAnswer:
    """Return the answer to an End whose verdict stands."""
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
        PublishedMessage(message_id(transaction_id, position), topic, offset)
        for position, topic, offset in recorded.messages
    ]


async def refusal(runtime: Runtime, end: End, recorded: Recorded) -> Problem:
    """Return why an End does not stand: no such half, a gone day, another group, or the opposite verdict."""
    if recorded.owner is None:
        return await unknown_transaction(runtime, end.transaction_id)
    if end.producer_group not in (None, recorded.owner):
        return WrongGroup("This transaction belongs to another producer group.")
    if recorded.verdict is None:
        if not recorded.open:
            return await unknown_transaction(runtime, end.transaction_id)
        # The winner of the race was rolled back by a crash between the two statements.
        return DatabaseUnavailable("The verdict could not be recorded just now; repeat it.", retry_after_s=1)
    word = VERDICT_WORDS[recorded.verdict]
    hint = " Its messages can go out anew: POST /transactions/{id}/reissue." if word == "rollback" else ""
    assert recorded.source is not None
    return VerdictConflict(
        f"The transaction is recorded as {word}, for good.{hint}",
        recorded={"verdict": word, "source": SOURCE_WORDS[recorded.source], "decided_at": recorded.decided_at},
    )


async def unknown_transaction(runtime: Runtime, transaction_id: UUID) -> Problem:
    """Return what to say of an id that has no half here: its day is gone (410), or it was never seen (404)."""
    async with runtime.database.connection() as connection:
        day = await day_of(connection, transaction_id)
    if day is None or day.state == "open":
        return TransactionUnknown("No half with this transaction_id was ever acknowledged.")
    where = f"it is archived at {day.archive}" if day.archive else "it was not archived"
    return DayGone(f"The transaction's day, {day.day}, has left the database; {where}.", archive=day.archive)


async def _unknown(runtime: Runtime, caller: Caller, request: EndRequest) -> tuple[int, bytes]:
    async with runtime.database.connection() as connection:
        found = await transaction_state(connection, request.transaction_id)
        if found is None or not caller.groups.takes(found.producer_group):
            raise await unknown_transaction(runtime, request.transaction_id)
        if found.producer_group != request.producer_group:
            raise WrongGroup("This transaction belongs to another producer group.")
        if request.from_check and found.state is State.IN_DOUBT:
            now = runtime.clock.now()
            if caller.role is Role.ADMIN:
                await record(connection, _act(caller, request), now)
            await answer_unknown(connection, request.transaction_id, now)
    return 202, _encode(UnknownAnswer(request.transaction_id, "unknown", found.state.value))


def _act(caller: Caller, request: EndRequest) -> Act:
    return act(
        caller,
        "transaction.end",
        request.transaction_id,
        producer_group=request.producer_group,
        verdict=request.verdict,
        from_check=request.from_check or None,
        reason=request.reason,
    )
