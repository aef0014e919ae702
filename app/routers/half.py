"""`POST /half`: a half message, stored and invisible."""

import msgspec

from app.access import Caller, Role
from app.acts import act
from app.decoding import decode
from app.errors import ContentDiffers, DatabaseUnavailable, Draining, GroupUnregistered, Problem, TopicUndeclared
from app.halves import first_difference, half_of, id_skew
from app.ids import message_id
from app.runtime import Runtime
from app.schemas import HalfAnswer, HalfMessageAnswer, HalfRequest
from app.store import topics
from app.store.audit import record
from app.store.halves import Half, StoredHalf, half_rows, stored_halves

_decoder = msgspec.json.Decoder(HalfRequest)
_encode = msgspec.json.Encoder().encode


async def post_half(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> tuple[int, bytes]:
    """Store a half: 201 after its commit, 200 for a repeat of what is stored.

    Raises Problem: see `refuse_new_half` and `refuse_unstored`, and what decoding and the lane raise.
    """
    request = decode(_decoder, body)
    half = half_of(request, runtime.settings, runtime.clock)
    note_trace(runtime, half, trace)
    await refuse_new_half(runtime, caller, half, chosen=request.transaction_id is not None)
    if caller.role is Role.ADMIN:
        await note_half(runtime, caller, "transaction.half", half)
    stored = await runtime.lanes.half.ask(half)
    if not stored.fresh and stored.digest != half.digest:
        raise await unstored(runtime, half, stored)
    return (201 if stored.fresh else 200), _encode(
        HalfAnswer(
            half.transaction_id,
            stored.born_at,  # type: ignore[arg-type]  # set wherever a digest is
            stored.first_check_at,  # type: ignore[arg-type]
            not stored.fresh,
            [
                HalfMessageAnswer(message_id(half.transaction_id, position), message.topic)
                for position, message in enumerate(half.messages)
            ],
        )
    )


def note_trace(runtime: Runtime, half: Half, trace: str | None) -> None:
    """Let a half's messages carry the request's trace, and its span tell which transaction it was."""
    half.traceparent = trace
    if runtime.tracing is not None:
        runtime.tracing.about(trace, half.transaction_id, half.producer_group)


async def note_half(runtime: Runtime, caller: Caller, what: str, half: Half) -> None:
    """Put on record what a person is about to send, without bodies; a producer's halves are their own record.

    Before it is flushed with others, in a commit of their own: so nothing that a person sent is without its act.
    """
    said = act(
        caller,
        what,
        half.transaction_id,
        producer_group=half.producer_group,
        topics=sorted({message.topic for message in half.messages}),
        messages=len(half.messages),
    )
    async with runtime.database.connection() as connection:
        await record(connection, said, runtime.clock.now())


async def refuse_new_half(runtime: Runtime, caller: Caller, half: Half, *, chosen: bool) -> None:
    """Refuse a half that its key does not reach, and any while the service is drained.

    Unless it is stored already, also one of an undeclared topic, or with a chosen id whose time is off.

    Raises Forbidden, Draining, TopicUndeclared or IdTimeSkew.
    """
    if caller.role is Role.PRODUCER:
        caller.must_have_group(half.producer_group)
        for message in half.messages:
            caller.must_have_topic(message.topic)
    if runtime.refusing_halves:
        raise Draining("This service takes ends, but no new halves.", retry_after_s=5)
    fault: Problem | None = None if runtime.declared is None else await _undeclared(runtime, runtime.declared, half)
    if chosen and fault is None:
        fault = id_skew(half.transaction_id, runtime.settings, runtime.clock)
    if fault is None:
        return
    if chosen:
        async with runtime.database.connection() as connection:
            stored = await stored_halves(connection, [half.transaction_id], [half.producer_group])
        if stored[half.transaction_id].digest is not None:
            return
    raise fault


async def _undeclared(runtime: Runtime, known: frozenset[str], half: Half) -> TopicUndeclared | None:
    names = [message.topic for message in half.messages]
    if known.issuperset(names):
        return None
    # It may have been declared a moment ago.
    async with runtime.database.connection() as connection:
        missing = await topics.undeclared(connection, set(names) - known)
    if not missing:
        return None
    position = min(names.index(name) for name in missing)
    return TopicUndeclared(
        f"Topic `{names[position]}` is not declared: an admin declares it by PUT /topics/<name>.",
        field=f"messages[{position}].topic",
    )


async def unstored(runtime: Runtime, half: Half, stored: StoredHalf) -> Problem:
    """Return why a half was not stored: its id holds other content, or its group is not registered."""
    if stored.digest is not None:
        async with runtime.database.connection() as connection:
            rows = await half_rows(connection, half.transaction_id)
        field = first_difference(rows, half)
        return ContentDiffers(f"This transaction_id is stored with another `{field}`.", field=field)
    if not stored.registered:
        return GroupUnregistered(
            f"Producer group `{half.producer_group}` is not registered: PUT /producer-groups/<name> first.",
            field="producer_group",
        )
    # The group was registered, or the day made, between two statements of one flush.
    return DatabaseUnavailable("The half could not be stored just now; repeat it.", retry_after_s=1)
