"""Calls of producers: messages, halves and ends."""

from uuid import UUID

from app.rocketmq.calls import ClientCall
from app.rocketmq.checks import CheckClaims
from app.rocketmq.clients import ConnectedClients
from app.rocketmq.names import topic_of
from app.rocketmq.protocol.definition_pb2 import Code, Status, TransactionResolution, TransactionSource
from app.rocketmq.protocol.service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    SendMessageRequest,
    SendMessageResponse,
    SendResultEntry,
)
from app.rocketmq.refusals import OK_STATUS, CallRefused
from app.rocketmq.sending import SentMessage, read_message
from app.rocketmq.storing import StoredSend, Storing

MESSAGES_MAX = 100
_VERDICTS = {TransactionResolution.COMMIT: "commit", TransactionResolution.ROLLBACK: "rollback"}


class Producing:
    """Sends messages to Halfnote. `body_limit`: bytes of one message."""

    def __init__(self, storing: Storing, clients: ConnectedClients, checks: CheckClaims, body_limit: int) -> None:
        self._storing, self._clients, self._checks = storing, clients, checks
        self._body_limit = body_limit

    async def send(self, request: SendMessageRequest, call: ClientCall) -> SendMessageResponse:
        """Store each message, or refuse it. Raises CallRefused if all messages are refused for one reason."""
        if not request.messages:
            raise CallRefused(Code.MESSAGE_CORRUPTED, "The request has no message.")
        if len(request.messages) > MESSAGES_MAX:
            raise CallRefused(Code.PAYLOAD_TOO_LARGE, f"A request has at most {MESSAGES_MAX} messages.")
        if any(one.topic != request.messages[0].topic for one in request.messages):
            raise CallRefused(Code.MESSAGE_CORRUPTED, "The messages of a request have one topic.")
        topic = topic_of(request.messages[0].topic)
        read = [read_message(one, topic, self._body_limit) for one in request.messages]
        client = self._clients.get(call.client_id, call.keys)
        if client is not None and any(one.transactional for one in read):
            client.sends_transactions = True
        # The protocol has no producer group.
        stored = await self._storing.store_all(topic, topic, read, call.keys)
        entries = [_entry(one, kept) for one, kept in zip(read, stored, strict=True)]
        if len(entries) == 1 and entries[0].status.code != Code.OK:
            return SendMessageResponse(status=entries[0].status)
        return SendMessageResponse(status=overall([one.status for one in entries]), entries=entries)

    async def end(self, request: EndTransactionRequest, call: ClientCall) -> EndTransactionResponse:
        """Record a verdict. An unknown one changes nothing. Raises CallRefused."""
        topic = topic_of(request.topic)
        try:
            transaction = UUID(request.transaction_id)
        except ValueError:
            raise CallRefused(Code.INVALID_TRANSACTION_ID, "The transaction id is not one of Halfnote.") from None
        said = request.source == TransactionSource.SOURCE_SERVER_CHECK
        checked = said or self._checks.is_out(topic, transaction, call.keys)
        verdict = _VERDICTS.get(request.resolution, "unknown")
        if verdict == "unknown" and not checked:
            return EndTransactionResponse(status=OK_STATUS)
        await self._storing.end(topic, transaction, verdict, call.keys, checked=checked)
        return EndTransactionResponse(status=OK_STATUS)


def _entry(message: SentMessage, stored: StoredSend | CallRefused) -> SendResultEntry:
    if isinstance(stored, CallRefused):
        return SendResultEntry(status=stored.status, message_id=message.message_id)
    return SendResultEntry(
        status=OK_STATUS,
        message_id=message.message_id,
        transaction_id=stored.transaction_id if message.transactional else "",
        offset=stored.offset,
    )


def overall(statuses: list[Status]) -> Status:
    """Return the status of a whole answer, from those of its entries."""
    codes = {one.code for one in statuses}
    if len(codes) == 1:
        return statuses[0]
    return Status(code=Code.MULTIPLE_RESULTS, message="The entries have different results.")
