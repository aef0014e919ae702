"""Calls of consumers: receive, acknowledge, give back, and dead letters."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from app.rocketmq.answer_sizes import AnswerSizes
from app.rocketmq.buffers import BufferedBytes
from app.rocketmq.calls import ClientCall
from app.rocketmq.claiming import Claiming
from app.rocketmq.clients import ConnectedClients
from app.rocketmq.filters import filters_of
from app.rocketmq.names import subscription_of, topic_of
from app.rocketmq.producing import overall
from app.rocketmq.protocol.definition_pb2 import Code, Status
from app.rocketmq.protocol.service_pb2 import (
    AckMessageRequest,
    AckMessageResponse,
    AckMessageResultEntry,
    ChangeInvisibleDurationRequest,
    ChangeInvisibleDurationResponse,
    ForwardMessageToDeadLetterQueueRequest,
    ForwardMessageToDeadLetterQueueResponse,
    ReceiveMessageRequest,
    ReceiveMessageResponse,
)
from app.rocketmq.receiving import delivered
from app.rocketmq.refusals import OK_STATUS, CallRefused
from app.rocketmq.renewals import Renewals, SentAnswer
from app.rocketmq.subscriptions import Shape, Subscriptions

# RocketMQ's limits of the time for which a consumer holds a message.
INVISIBLE_LEAST_S, INVISIBLE_MOST_S = 10.0, 43_200.0
POLL_MOST_S = 20.0
# Left of the caller's deadline for the answer to arrive.
MARGIN_S = 0.5
HANDLE_MAX = 500


class Consuming:
    """Claims messages of subscriptions for clients, and settles them."""

    def __init__(
        self, claiming: Claiming, clients: ConnectedClients, subscriptions: Subscriptions, renewals: Renewals
    ) -> None:
        self._claiming, self._clients, self._subscriptions, self._renewals = claiming, clients, subscriptions, renewals
        self._buffers, self._sizes = claiming.buffers, AnswerSizes()

    async def receive(
        self, request: ReceiveMessageRequest, call: ClientCall
    ) -> AsyncGenerator[ReceiveMessageResponse, None]:
        """Yield a status, then the messages. Raises CallRefused before the first."""
        buffered = self._buffers.part()
        try:
            async with aclosing(self._received(request, call, buffered)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            buffered.release()

    async def _received(
        self, request: ReceiveMessageRequest, call: ClientCall, buffered: BufferedBytes
    ) -> AsyncGenerator[ReceiveMessageResponse, None]:
        resource = request.message_queue.topic
        topic = topic_of(resource)
        name = subscription_of(request.group, topic)
        wanted_s = _held_s(request)
        shape = await self._ready(request, call, name, topic)
        was_connected = self._clients.get(call.client_id, call.keys) is not None
        one_by_one = shape["ordered"] == "key" and self._mixes_up(request, call)
        size = self._sizes.of(call.client_id, call.keys, name)
        claimed = await self._claiming.claim(
            name,
            call.keys,
            most=1 if one_by_one else min(max(request.batch_size, 1), size.most),
            held_s=wanted_s,
            wait_s=_poll_s(request, call.left_s),
            buffered=buffered,
        )
        if claimed and request.auto_renew and was_connected and self._clients.get(call.client_id, call.keys) is None:
            # It has ended meanwhile. If it only connects once more, it asks again.
            why = "the consumer left while it waited"
            self._claiming.give_back_unsent(name, call.keys, [one.handle for one in claimed], why)
            claimed = []
        if not claimed:
            yield ReceiveMessageResponse(status=Status(code=Code.MESSAGE_NOT_FOUND, message="There is no new message."))
            return
        handles = [one.handle for one in claimed]
        # How many messages were passed on, the last of them perhaps in vain, and how many were read.
        passed, read, whole, body_bytes = 0, 0, False, 0
        held_s = self._claiming.held_s if wanted_s is None else wanted_s
        sent = SentAnswer(self._clients.connection_of(call))
        try:
            if request.auto_renew:
                self._renewals.hold(handles, call.client_id, name, call.keys, held_s, sent)
            yield ReceiveMessageResponse(status=OK_STATUS)
            for one in claimed:
                if sent.is_left:
                    # The rest was given back as the client said that it ends.
                    break
                sent.passes(one.handle)
                # Also before its translation: one that fails there must use up its attempts.
                passed += 1
                message = delivered(one, resource, held_s)
                body_bytes += len(message.body)
                yield ReceiveMessageResponse(message=message)
                read += 1
            end = ReceiveMessageResponse()
            end.delivery_timestamp.GetCurrentTime()
            yield end
            whole = True
            # gRPC has taken it. That the client gets it shows later.
            sent.written(time.monotonic())
            size.sent(passed, body_bytes)
            size.arrived()
        finally:
            if not whole:
                size.lost()
                self._renewals.settled(handles)
                sent.broke()
                # A client drops what it read of an answer without an end. That lapses, unless the client has left.
                if sent.is_left:
                    self._give_back(name, call, handles[:passed], ())
                else:
                    self._give_back(name, call, handles[read:passed], handles[passed:])

    async def acknowledge(self, request: AckMessageRequest, call: ClientCall) -> AckMessageResponse:
        """Acknowledge messages. Raises CallRefused."""
        name = subscription_of(request.group, topic_of(request.topic))
        if not request.entries:
            raise CallRefused(Code.BAD_REQUEST, "The request has no entry.")
        handles = [entry.receipt_handle for entry in request.entries]
        statuses = await self._settle(name, call, "ack", handles, {})
        entries = [
            AckMessageResultEntry(message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=status)
            for entry, status in zip(request.entries, statuses, strict=True)
        ]
        return AckMessageResponse(status=overall(statuses), entries=entries)

    async def change_invisible(
        self, request: ChangeInvisibleDurationRequest, call: ClientCall
    ) -> ChangeInvisibleDurationResponse:
        """Let a message come again after a time, or hold it until then. Raises CallRefused.

        A push consumer says by this that its handler failed, so it is a failed attempt at once. A simple consumer may
        still acknowledge in that time.
        """
        name = subscription_of(request.group, topic_of(request.topic))
        seconds = request.invisible_duration.ToMilliseconds() / 1000
        if not 0 <= seconds <= INVISIBLE_MOST_S:
            raise CallRefused(Code.ILLEGAL_INVISIBLE_TIME, f"The time is from 0 to {INVISIBLE_MOST_S:.0f} s.")
        client = self._clients.get(call.client_id, call.keys)
        handle = request.receipt_handle
        # Only push consumers have messages that are renewed. The stream by which this one is known may be broken now.
        pushed = handle in self._renewals or (client is not None and client.pushes)
        if seconds < 1 or pushed:
            more: dict[str, Any] = {"retry_after_s": seconds, "error": "the consumer asked for it again"}
            (status,) = await self._settle(name, call, "nack", [handle], more)
        else:
            (status,) = await self._settle(name, call, "extend", [handle], {"invisible_s": seconds})
        return ChangeInvisibleDurationResponse(status=status, receipt_handle=handle)

    async def forward_to_dead_letters(
        self, request: ForwardMessageToDeadLetterQueueRequest, call: ClientCall
    ) -> ForwardMessageToDeadLetterQueueResponse:
        """Make a message a dead letter of its subscription. Raises CallRefused."""
        name = subscription_of(request.group, topic_of(request.topic))
        reason = f"the consumer gave up at attempt {request.delivery_attempt} of {request.max_delivery_attempts}"
        (status,) = await self._settle(name, call, "reject", [request.receipt_handle], {"reason": reason})
        return ForwardMessageToDeadLetterQueueResponse(status=status)

    async def _ready(self, request: ReceiveMessageRequest, call: ClientCall, name: str, topic: str) -> Shape:
        """Make the subscription exist and filter as the client says, if the client says something new; return it."""
        filters = filters_of(request.filter_expression)
        client = self._clients.get(call.client_id, call.keys)
        said = request.filter_expression.SerializeToString(deterministic=True).hex()
        if client is None or client.expressions.get(name) == said:
            return await self._subscriptions.of(name, topic, call.keys, filters)
        await self._subscriptions.filter_by(name, topic, call.keys, filters)
        client.expressions[name] = said
        return await self._subscriptions.of(name, topic, call.keys, filters)

    def _mixes_up(self, request: ReceiveMessageRequest, call: ClientCall) -> bool:
        """Return whether a client works on several messages of a key at a time."""
        if call.language == "GO":
            # Apache's client for Go goes on with the next message of a batch while one that failed waits for its retry.
            return True
        client = self._clients.get(call.client_id, call.keys)
        # A push consumer that was not told of the order has several handlers: the subscription became ordered later, or
        # Halfnote did not answer when the consumer started.
        return request.auto_renew and (client is None or not client.fifo)

    async def _settle(
        self, name: str, call: ClientCall, how: str, handles: Sequence[str], more: dict[str, Any]
    ) -> list[Status]:
        """Settle messages; return a status of each. They are renewed until then, and while the consumer tries again."""
        if not all(0 < len(handle) <= HANDLE_MAX for handle in handles):
            raise CallRefused(Code.INVALID_RECEIPT_HANDLE, "A receipt handle is missing, or is not one of Halfnote.")
        self._renewals.settling(handles)
        try:
            refusals = await self._claiming.settle(name, call.keys, how, handles, **more)
        except BaseException:
            self._renewals.tried(handles)
            raise
        for handle, refused in zip(handles, refusals, strict=True):
            if refused is not None and refused.for_now:
                self._renewals.tried([handle])
            else:
                self._renewals.settled([handle])
        return [OK_STATUS if refused is None else refused.status for refused in refusals]

    def _give_back(self, name: str, call: ClientCall, passed: Sequence[str], unsent: Sequence[str]) -> None:
        """Let messages come again that were claimed for a client which no longer reads."""
        why = "the consumer left before it got the message"
        self._claiming.give_back(name, call.keys, passed, why)
        self._claiming.give_back_unsent(name, call.keys, unsent, why)


def _held_s(request: ReceiveMessageRequest) -> float | None:
    """Return for how long a client wants to hold messages; None: their time is renewed. Raises CallRefused."""
    if request.auto_renew:
        return None
    seconds = request.invisible_duration.ToMilliseconds() / 1000
    if not INVISIBLE_LEAST_S <= seconds <= INVISIBLE_MOST_S:
        raise CallRefused(
            Code.ILLEGAL_INVISIBLE_TIME,
            f"A message is held for {INVISIBLE_LEAST_S:.0f} to {INVISIBLE_MOST_S:.0f} s, not for {seconds} s.",
        )
    return seconds


def _poll_s(request: ReceiveMessageRequest, left_s: float | None) -> float:
    wanted = POLL_MOST_S
    if request.HasField("long_polling_timeout"):
        wanted = min(wanted, request.long_polling_timeout.ToMilliseconds() / 1000)
    if left_s is not None:
        wanted = min(wanted, left_s - MARGIN_S)
    return max(0.0, wanted)
