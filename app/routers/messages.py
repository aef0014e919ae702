"""`POST /messages`: half and commit in one call. `GET /messages/{message_id}`: one message and its deliveries."""

import re
from collections.abc import Coroutine
from functools import partial
from typing import Annotated, Any
from uuid import UUID

import msgspec
from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from pydantic import Field

from app.coordinator.commit_lanes import PlainOutcome
from app.coordinator.decoding import decode
from app.coordinator.half_content import half_of
from app.coordinator.lane_call import Begun, JsonAnswer, LaneCall
from app.coordinator.wire import PlainAnswer, PlainRequest, PlainsRequest
from app.errors import DayGone, Invalid, MessageUnknown, TransactionUnknown
from app.ids import parse_message_id
from app.permissions import EVERYTHING, Caller, Role
from app.routers.batches import ManyRoute
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.end import published, unknown_transaction
from app.routers.half import begin_half, note_trace, refused
from app.routers.message_body import with_body
from app.routers.timeline import known, message_fields
from app.runtime.state import Runtime
from app.schemas.delivery_cursor import DeliveryCursor, cursor_of, place_of
from app.schemas.fields import Strict
from app.schemas.transactions import ID, StoredMessageShown
from app.store.coordinator.deliveries import DeliveryPlace, DeliverySelection
from app.store.coordinator.halves import Half, message_body
from app.store.coordinator.history import Owner, read_history, read_owner
from app.store.coordinator.ops import Recorded
from app.store.coordinator.transactions import state_of

router = APIRouter(prefix="/messages", tags=["messages"])

MessageId = Annotated[
    str, Path(description="`<transaction_id>-<position>`, as `/half` answered it", examples=[f"{ID}-0"])
]

_decoder = msgspec.json.Decoder(PlainRequest)
_encode = msgspec.json.Encoder().encode
# The field of PlainsRequest, which PlainRequest does not have, where most requests have it: first.
_begins_with_many = re.compile(rb'\s*\{\s*"transactions"\s*:').match


class _Many(msgspec.Struct):
    """Tells whether a body has the field, wherever it is: the fields of a JSON object have no order."""

    transactions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_many = msgspec.json.Decoder(_Many)


def post_messages(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> Begun:
    """Store and commit messages that have nothing to coordinate: 201 after the commit, 200 for a repeat.

    A body with the field `transactions` has many of them. Raises Problem as `POST /half` does.
    """
    if _begins_with_many(body):
        return plains_begun(runtime, caller, body, trace)
    try:
        request = decode(_decoder, body)
    except Invalid:
        if not _has_many(body):
            raise
        return plains_begun(runtime, caller, body, trace)
    return plain_begun(runtime, caller, request, trace)


def _has_many(body: bytes) -> bool:
    try:
        return _many.decode(body).transactions is not msgspec.UNSET
    except msgspec.ValidationError:
        return False  # no object


def plain_begun(runtime: Runtime, caller: Caller, request: PlainRequest, trace: str | None) -> Begun:
    """Do the same for one decoded transaction."""
    half = half_of(request, runtime.settings, runtime.clock)
    note_trace(runtime, half, trace)
    call = LaneCall(runtime.lanes.plain, half, partial(_answer, runtime, half))
    return begin_half(runtime, caller, call, "transaction.plain", chosen=request.transaction_id is not None)


def plains_begun(runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> Begun:
    """Do the same for a body with many transactions: 200 with an outcome of each."""
    return _PLAINS.begun(runtime, caller, body, trace)


def _answer(runtime: Runtime, half: Half, outcome: PlainOutcome) -> JsonAnswer | Coroutine[Any, Any, JsonAnswer]:
    recorded: Recorded | None = outcome.recorded
    if outcome.half.digest != half.digest or recorded is None or recorded.decided_at is None:
        return refused(runtime, half, outcome.half)
    return (201 if recorded.fresh else 200), _encode(
        PlainAnswer(
            half.transaction_id, recorded.decided_at, not recorded.fresh, published(half.transaction_id, recorded)
        )
    )


_PLAINS = ManyRoute("/messages", "transactions", PlainsRequest, PlainRequest, plain_begun)


class MessageQuery(Strict):
    """Selects the deliveries that are shown."""

    cursor: DeliveryCursor | None = Field(None, description="`deliveries_cursor` of the answer before")


@router.get(
    "/{message_id}",
    summary="Show a message with its body and its deliveries",
    response_model=StoredMessageShown,
    responses=problems(Invalid, TransactionUnknown, MessageUnknown, DayGone),
)
async def get_message(
    runtime: RuntimeDep, caller: CallerDep, message_id: MessageId, query: Annotated[MessageQuery, Query()]
) -> Response:
    """Return a message of any transaction, also of an undecided or rolled-back one.

    `body` is the producer's JSON, byte for byte, if the content type's subtype is `json` or ends in `+json` and the
    bytes are JSON in UTF-8. Any other body comes as `body_base64`. A subscriber's key sees only committed messages of
    its topics, and only its own deliveries. A producer's key sees only messages of its groups. A key
    without the permission `bodies` gets `body_hidden` in place of the body. The answer has the first 1,000 deliveries;
    if `deliveries_cursor` is not null, the same request with it as `cursor` has the next ones.
    """
    parsed = parse_message_id(message_id)
    if parsed is None:
        raise MessageUnknown("This is not a message_id: it has the form `<transaction_id>-<position>`.")
    transaction_id, position = parsed
    history, body = None, None
    async with runtime.request_pool.connection() as connection:
        # The scope is judged first: reading a history out of scope would show by its time that the id exists.
        if _may_read(caller, await read_owner(connection, transaction_id, position)):
            # The answer shows no attempts.
            history = await read_history(connection, transaction_id, 1, _deliveries(caller, position, query))
            body = await message_body(connection, transaction_id, position)
    if history is None:
        raise await unknown_transaction(runtime, transaction_id)
    if body is None:
        raise MessageUnknown(f"This transaction has {len(history.messages)} messages, from position 0.")
    message = history.messages[position]
    sent = next((row for row in history.published if row.position == position), None)
    shown = StoredMessageShown(
        transaction_id=transaction_id,
        producer_group=message.producer_group,
        state=state_of(history.record.verdict, history.record.check_back),
        born_at=message.born_at,
        **message_fields(history, message, sent),
        deliveries_cursor=cursor_of(history.more_after),
        **known(committed_at=sent.committed_at if sent else None),
    )
    return with_body(shown, caller, body, message.content_type)


def _deliveries(caller: Caller, position: int, query: MessageQuery) -> DeliverySelection:
    """Return which deliveries of a message to read: a subscriber's key sees its own."""
    within = caller.subscriptions.within if caller.role is Role.SUBSCRIBER else EVERYTHING
    place = DeliveryPlace(position, "", 0, 0) if query.cursor is None else place_of(query.cursor)
    return DeliverySelection(place._replace(position=position), position, within)


async def read_bodies(runtime: Runtime, caller: Caller, transaction_id: UUID, at_most: int) -> list[bytes]:
    """Return the bodies of the first messages of a transaction: those that the caller may read."""
    bodies: list[bytes] = []
    async with runtime.request_pool.connection() as connection:
        while caller.reads_bodies and len(bodies) < at_most:
            may_read = _may_read(caller, await read_owner(connection, transaction_id, len(bodies)))
            body = await message_body(connection, transaction_id, len(bodies)) if may_read else None
            if body is None:
                break
            bodies.append(body)
    return bodies


def _may_read(caller: Caller, owner: Owner | None) -> bool:
    if owner is None:
        return False
    if caller.role is not Role.SUBSCRIBER:
        return caller.groups.takes(owner.producer_group)
    # For subscribers an uncommitted message does not exist.
    return owner.published_topic is not None and caller.topics.takes_topic(owner.published_topic)
