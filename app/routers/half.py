"""`POST /half`: stores a half message, invisible until its commit."""

import msgspec

from app.coordinator.decoding import decode
from app.coordinator.half_content import first_difference, half_of, id_skew
from app.coordinator.wire import HalfAnswer, HalfMessageAnswer, HalfRequest
from app.errors import ContentDiffers, DatabaseUnavailable, Draining, GroupUnregistered, Problem, TopicUndeclared
from app.ids import message_id
from app.operations.audit import audit_entry
from app.permissions import Caller, Role
from app.runtime.state import Runtime
from app.store.admin.audit import record
from app.store.coordinator import topics
from app.store.coordinator.halves import Half, StoredHalf, half_rows, stored_halves

_decoder = msgspec.json.Decoder(HalfRequest)
_encode = msgspec.json.Encoder().encode


async def post_half(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> tuple[int, bytes]:
    """Store a half: 201 after its commit, 200 for a repeat with the same content.

    Raises Problem: see `refuse_new_half`, `refuse_unstored`, decoding and the lane.
    """
    request = decode(_decoder, body)
    half = half_of(request, runtime.settings, runtime.clock)
    note_trace(runtime, half, trace)
    await refuse_new_half(runtime, caller, half, chosen=request.transaction_id is not None)
    if caller.role is Role.ADMIN:
        await note_half(runtime, caller, "transaction.half", half)
    stored = await runtime.lanes.half.commit(half)
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
    """Attach the request's trace context to the half's messages, and the transaction id to the request's span."""
    half.traceparent = trace
    if runtime.tracing is not None:
        runtime.tracing.about(trace, half.transaction_id, half.producer_group)


async def note_half(runtime: Runtime, caller: Caller, what: str, half: Half) -> None:
    """Write the audit row of a half that a person sends, without bodies. A producer's half needs no audit row.

    The row is committed before the half is flushed, so every half that a person sent has one.
    """
    said = audit_entry(
        caller,
        what,
        half.transaction_id,
        producer_group=half.producer_group,
        topics=sorted({message.topic for message in half.messages}),
        messages=len(half.messages),
    )
    async with runtime.request_pool.connection() as connection:
        await record(connection, said, runtime.clock.now())


async def refuse_new_half(runtime: Runtime, caller: Caller, half: Half, *, chosen: bool) -> None:
    """Refuse a half that the key's scope excludes, and every half while the service drains.

    A half that is not stored yet is also refused if a topic is undeclared, or if its chosen id has a time too far off.

    Raises Forbidden, Draining, TopicUndeclared or IdTimeSkew.
    """
    if caller.role is Role.PRODUCER:
        caller.must_have_group(half.producer_group)
        for message in half.messages:
            caller.must_have_topic(message.topic)
    if runtime.refusing_halves:
        raise Draining(
            "This service drains: it accepts ends, but no new halves. Repeat the request later.",
            retry_after_s=5,
        )
    fault: Problem | None = None if runtime.declared is None else await _undeclared(runtime, runtime.declared, half)
    if chosen and fault is None:
        fault = id_skew(half.transaction_id, runtime.settings, runtime.clock)
    if fault is None:
        return
    if chosen:
        async with runtime.request_pool.connection() as connection:
            stored = await stored_halves(connection, [half.transaction_id], [half.producer_group])
        if stored[half.transaction_id].digest is not None:
            return
    raise fault


async def _undeclared(runtime: Runtime, known: frozenset[str], half: Half) -> TopicUndeclared | None:
    names = [message.topic for message in half.messages]
    if known.issuperset(names):
        return None
    # The topic may have been declared since the last read.
    async with runtime.request_pool.connection() as connection:
        missing = await topics.undeclared(connection, set(names) - known)
    if not missing:
        return None
    position = min(names.index(name) for name in missing)
    return TopicUndeclared(
        f"Topic `{names[position]}` is not declared. An admin declares it by PUT /topics/<name>.",
        field=f"messages[{position}].topic",
    )


async def unstored(runtime: Runtime, half: Half, stored: StoredHalf) -> Problem:
    """Return why a half was not stored: its id is stored with other content, or its group is not registered."""
    if stored.digest is not None:
        async with runtime.request_pool.connection() as connection:
            rows = await half_rows(connection, half.transaction_id)
        field = first_difference(rows, half)
        return ContentDiffers(
            f"This transaction_id is stored with another `{field}`. Use a new id for new content.", field=field
        )
    if not stored.registered:
        return GroupUnregistered(
            f"Producer group `{half.producer_group}` is not registered: PUT /producer-groups/<name> first.",
            field="producer_group",
        )
    # The group was registered, or the day made, between two statements of one flush.
    return DatabaseUnavailable("The half could not be stored now. Repeat the request.", retry_after_s=1)
