"""`POST /half`: stores a half message, invisible until its commit."""

from collections.abc import Coroutine
from functools import partial
from typing import Any, NoReturn

import msgspec

from app.coordinator.decoding import decode
from app.coordinator.half_content import first_difference, half_of, id_skew
from app.coordinator.lane_call import Begun, JsonAnswer, LaneCall, completed
from app.coordinator.wire import HalfAnswer, HalfMessageAnswer, HalfRequest
from app.errors import ContentDiffers, DatabaseUnavailable, Draining, GroupUnregistered, Problem, TopicUndeclared
from app.ids import message_id
from app.operations.audit import audit_entry
from app.permissions import Caller, Role
from app.runtime.state import Runtime
from app.store.admin.audit import record
from app.store.coordinator import topics
from app.store.coordinator.halves import Half, StoredHalf, half_rows, stored_halves
from app.verdicts import VERDICT_WORDS

_decoder = msgspec.json.Decoder(HalfRequest)
_encode = msgspec.json.Encoder().encode


def post_half(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> Begun:
    """Store a half: 201 after its commit, 200 for a repeat with the same content, with the verdict if there is one.

    Raises Problem: see `begin_half`, decoding and the lane. The answer raises what `unstored` returns.
    """
    return half_begun(runtime, caller, decode(_decoder, body), trace)


def half_begun(runtime: Runtime, caller: Caller, request: HalfRequest, trace: str | None) -> Begun:
    """Do the same for a decoded request."""
    half = half_of(request, runtime.settings, runtime.clock)
    note_trace(runtime, half, trace)
    call = LaneCall(runtime.lanes.half, half, partial(_answer, runtime, half))
    return begin_half(runtime, caller, call, "transaction.half", chosen=request.transaction_id is not None)


def _answer(runtime: Runtime, half: Half, stored: StoredHalf) -> JsonAnswer | Coroutine[Any, Any, JsonAnswer]:
    if not stored.fresh and stored.digest != half.digest:
        return refused(runtime, half, stored)
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
            None if stored.verdict is None else VERDICT_WORDS[stored.verdict],  # type: ignore[arg-type]
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


def begin_half(runtime: Runtime, caller: Caller, call: LaneCall[Half, Any], what: str, *, chosen: bool) -> Begun:
    """Refuse a half that the key's scope excludes. Else return what follows.

    A half that is not stored yet is also refused while the service drains, if a topic is undeclared, or if its chosen
    id has a time too far off.

    `what` is the action of the audit row. Raises Forbidden or Draining; the answer raises Draining, TopicUndeclared or
    IdTimeSkew.
    """
    half = call.request
    if caller.role is Role.PRODUCER:
        caller.must_have_group(half.producer_group)
        for message in half.messages:
            caller.must_have_topic(message.topic)
    fault: Problem | None = None
    if runtime.refusing_halves:
        fault = Draining(
            "This service drains: it accepts ends, but no new halves. Repeat the request later.",
            retry_after_s=5,
        )
        # A few reads at once: most refused halves are new, and others need the connections.
        if not chosen or runtime.stopping or runtime.repeat_looks.locked():
            raise fault
    elif chosen:
        fault = id_skew(half.transaction_id, runtime.settings, runtime.clock)
    if fault is None and caller.role is not Role.ADMIN and not _unknown_topics(runtime, half):
        return call
    return _begin_after_reads(runtime, caller, call, what, fault, chosen=chosen)


async def _begin_after_reads(
    runtime: Runtime, caller: Caller, call: LaneCall[Half, Any], what: str, known: Problem | None, *, chosen: bool
) -> JsonAnswer:
    """Check in the database what this process cannot know, write the audit row of a person, then go on to the lane."""
    half = call.request
    fault = known if isinstance(known, Draining) else await _undeclared(runtime, half) or known
    if fault is not None and not (chosen and await _is_stored(runtime, half)):
        raise fault
    if caller.role is Role.ADMIN:
        await note_half(runtime, caller, what, half)
    return await completed(call)


async def _is_stored(runtime: Runtime, half: Half) -> bool:
    async with runtime.repeat_looks, runtime.request_pool.connection() as connection:
        stored = await stored_halves(connection, [half.transaction_id], [half.producer_group])
    return stored[half.transaction_id].digest is not None


def _unknown_topics(runtime: Runtime, half: Half) -> set[str]:
    """Return the topics that this process does not know as declared; none where topics need no declaration."""
    known = runtime.declared
    return set() if known is None else {message.topic for message in half.messages} - known


async def _undeclared(runtime: Runtime, half: Half) -> TopicUndeclared | None:
    unknown = _unknown_topics(runtime, half)
    if not unknown:
        return None
    # The topic may have been declared since the last read.
    async with runtime.request_pool.connection() as connection:
        missing = await topics.undeclared(connection, unknown)
    if not missing:
        return None
    names = [message.topic for message in half.messages]
    position = min(names.index(name) for name in missing)
    return TopicUndeclared(
        f"Topic `{names[position]}` is not declared. An admin declares it by PUT /topics/<name>.",
        field=f"messages[{position}].topic",
    )


async def refused(runtime: Runtime, half: Half, stored: StoredHalf) -> NoReturn:
    """Raise why a half was not stored."""
    raise await unstored(runtime, half, stored)


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
