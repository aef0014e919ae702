"""Calls of producers: messages, halves and ends."""

import asyncio
import json
from datetime import UTC, datetime
from uuid import UUID

import structlog

from app.rocketmq.calls import ClientCall
from app.rocketmq.checks import CheckClaims
from app.rocketmq.clients import ConnectedClients
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.message_ids import made_at, step_of, transaction_id
from app.rocketmq.names import topic_of
from app.rocketmq.paths import path_of
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

log = structlog.get_logger(__name__)

MESSAGES_MAX = 100
_VERDICTS = {TransactionResolution.COMMIT: "commit", TransactionResolution.ROLLBACK: "rollback"}


class Producing:
    """Sends messages to Halfnote. `body_limit`: bytes of one message."""

    def __init__(self, api: HalfnoteApi, clients: ConnectedClients, checks: CheckClaims, body_limit: int) -> None:
        self._api, self._clients, self._checks = api, clients, checks
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
        entries = await asyncio.gather(*(self._entry(topic, one, call) for one in read))
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
        checked = self._checks.answered(transaction) or request.source == TransactionSource.SOURCE_SERVER_CHECK
        verdict = _VERDICTS.get(request.resolution, "unknown")
        if verdict == "unknown" and not checked:
            return EndTransactionResponse(status=OK_STATUS)
        content = {
            "producer_group": topic,
            "transaction_id": str(transaction),
            "verdict": verdict,
            "from_check": checked,
        }
        await self._api.post("/end", call.keys.producer, content)
        return EndTransactionResponse(status=OK_STATUS)

    async def _entry(self, topic: str, message: SentMessage, call: ClientCall) -> SendResultEntry:
        try:
            return await self._stored(topic, message, call)
        except CallRefused as refused:
            return SendResultEntry(status=refused.status, message_id=message.message_id)

    async def _stored(self, topic: str, message: SentMessage, call: ClientCall) -> SendResultEntry:
        if message.transactional:
            client = self._clients.get(call.client_id, call.keys)
            if client is not None:
                client.sends_transactions = True
        now = datetime.now(UTC)
        at = made_at(message.message_id) or step_of(now)
        for last in (False, False, True):
            try:
                return await self._store(topic, message, call, at, now)
            except CallRefused as refused:
                if not last and refused.slug == "group-unregistered":
                    await self._declare(topic, call)
                elif not last and refused.slug == "id-time-skew":
                    # The client's clock is wrong.
                    at = step_of(now)
                else:
                    raise
        raise AssertionError("the last turn returns or raises")

    async def _store(
        self, topic: str, message: SentMessage, call: ClientCall, at: datetime, now: datetime
    ) -> SendResultEntry:
        named = str(transaction_id(at, topic.encode() + b"\0" + message.content))
        path = "/half" if message.transactional else "/messages"
        offset = 0
        try:
            answer = json.loads(await self._api.post(path, call.keys.producer, message.request(topic, named, now)))
            offset = answer["messages"][0].get("offset", 0)
        except CallRefused as refused:
            # A delay ends at a time, so a repeat of the same message has a shorter one.
            if refused.slug != "content-differs" or refused.field != "messages[0].deliver_after_s":
                raise
        return SendResultEntry(
            status=OK_STATUS,
            message_id=message.message_id,
            transaction_id=named if message.transactional else "",
            offset=offset,
        )

    async def _declare(self, topic: str, call: ClientCall) -> None:
        try:
            await self._api.call("PUT", path_of("producer-groups", topic), call.keys.producer, {"checks": "claim"})
        except CallRefused as refused:
            if refused.code not in (Code.FORBIDDEN, Code.UNAUTHORIZED):
                raise
            raise CallRefused(
                Code.TOPIC_NOT_FOUND,
                f"The topic `{topic}` has no producer group in Halfnote, and this client may not register one. An "
                f"admin runs `halfnote groups put {topic} --checks claim`.",
            ) from None
        log.info("rocketmq_producer_group_declared", group=topic)
        self._checks.declared(topic)


def overall(statuses: list[Status]) -> Status:
    """Return the status of a whole answer, from those of its entries."""
    codes = {one.code for one in statuses}
    if len(codes) == 1:
        return statuses[0]
    return Status(code=Code.MULTIPLE_RESULTS, message="The entries have different results.")
