"""`POST /messages`: plain messages, half and commit at once. `GET /messages/{message_id}`: one and where it went."""

from dataclasses import replace
from typing import Annotated

import msgspec
from fastapi import APIRouter, Path
from fastapi.responses import Response

from app.access import Caller, Role
from app.bodies import with_body
from app.decoding import decode
from app.errors import DayGone, MessageUnknown, TransactionUnknown
from app.halves import half_of
from app.ids import parse_message_id
from app.routers.end import published, unknown_transaction
from app.routers.half import note_half, note_trace, refuse_new_half, unstored
from app.routers.shared import CallerDep, RuntimeDep, problems
from app.runtime import Runtime
from app.schemas import PlainAnswer, PlainRequest
from app.shapes import ID, StoredMessageShown
from app.store.halves import message_body
from app.store.history import History, read_history
from app.store.ops import Recorded
from app.store.transactions import state_of
from app.timeline import known, message_fields

router = APIRouter(prefix="/messages", tags=["messages"])

MessageId = Annotated[
    str, Path(description="`<transaction_id>-<position>`, as `/half` answered it", examples=[f"{ID}-0"])
]

_decoder = msgspec.json.Decoder(PlainRequest)
_encode = msgspec.json.Encoder().encode


async def post_messages(runtime: Runtime, caller: Caller, body: bytes, trace: str | None = None) -> tuple[int, bytes]:
    """Store and commit messages that have nothing to coordinate: 201 after the commit, 200 for a repeat.

    Raises Problem as `POST /half` does.
    """
    request = decode(_decoder, body)
    half = half_of(request, runtime.settings, runtime.clock)
    note_trace(runtime, half, trace)
    await refuse_new_half(runtime, caller, half, chosen=request.transaction_id is not None)
    if caller.role is Role.ADMIN:
        await note_half(runtime, caller, "transaction.plain", half)
    outcome = await runtime.lanes.plain.ask(half)
    recorded: Recorded | None = outcome.recorded
    if outcome.half.digest != half.digest or recorded is None or recorded.decided_at is None:
        raise await unstored(runtime, half, outcome.half)
    return (201 if recorded.fresh else 200), _encode(
        PlainAnswer(
            half.transaction_id, recorded.decided_at, not recorded.fresh, published(half.transaction_id, recorded)
        )
    )


@router.get(
    "/{message_id}",
    summary="One message with its body and where it went",
    response_model=StoredMessageShown,
    responses=problems(TransactionUnknown, MessageUnknown, DayGone),
)
async def get_message(runtime: RuntimeDep, caller: CallerDep, message_id: MessageId) -> Response:
    """Return a message, also of a transaction that is undecided or rolled back.

    `body` is the producer's JSON verbatim; what is not of a JSON content type comes as `body_base64`. A subscriber's
    key is shown committed messages of its topics, and its own deliveries of them; to a producer's key only messages of
    its groups exist.
    """
    parsed = parse_message_id(message_id)
    if parsed is None:
        raise MessageUnknown("A message_id is `<transaction_id>-<position>`.")
    transaction_id, position = parsed
    async with runtime.database.connection() as connection:
        history = await read_history(connection, transaction_id)
        body = await message_body(connection, transaction_id, position)
    if history is None or not _may_read(caller, history, position):
        raise await unknown_transaction(runtime, transaction_id)
    if body is None:
        raise MessageUnknown(f"This transaction has {len(history.messages)} messages, from position 0.")
    if caller.role is Role.SUBSCRIBER:
        history = replace(
            history, deliveries=[one for one in history.deliveries if caller.subscriptions.takes(one.subscription)]
        )
    message = history.messages[position]
    sent = next((row for row in history.published if row.position == position), None)
    shown = StoredMessageShown(
        transaction_id=transaction_id,
        producer_group=message.producer_group,
        state=state_of(history.record.verdict, history.record.check_back),
        born_at=message.born_at,
        **message_fields(history, message, sent),
        **known(committed_at=sent.committed_at if sent else None),
    )
    return with_body(shown, body, message.content_type)


def _may_read(caller: Caller, history: History, position: int) -> bool:
    if caller.role is not Role.SUBSCRIBER:
        return caller.groups.takes(history.messages[0].producer_group)
    # A message that nobody may see yet, or ever, is not there for those who take messages.
    return any(one.position == position for one in history.published) and caller.topics.takes_topic(
        history.messages[position].topic
    )
