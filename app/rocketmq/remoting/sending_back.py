"""Messages that consumers give back: to come again later, or as dead letters."""

import asyncio
from typing import Any

from app.rocketmq.claiming import Claiming
from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.claim_queues import ClaimQueue, HeldDelivery
from app.rocketmq.remoting.codes import RemotingRefused, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.names import RETRY, subscription_of, topic_of, with_namespace
from app.rocketmq.remoting.remoting_clients import RemotingClient, RemotingClients
from app.rocketmq.remoting.requests import RemotingCall
from app.rocketmq.remoting.sent_messages import HANDLE, SendFields, delay_s
from app.rocketmq.remoting.store_format import message_id, read_properties
from app.rocketmq.renewals import Renewals

# A delay level below 0 asks for a dead letter; 0 leaves the time to the server.
_SAID_AGAIN = {"error": "the consumer asked for it again"}
_SAID_DEAD = {"reason": "the consumer gave up"}


class SendingBack:
    """Settles what a consumer could not do."""

    def __init__(self, clients: RemotingClients, claiming: Claiming, renewals: Renewals) -> None:
        self._clients, self._claiming, self._renewals = clients, claiming, renewals

    async def by_place(self, call: RemotingCall) -> RemotingFrame:
        """Give back the message at a place in the commit log. Raises CallRefused, RemotingRefused."""
        client, group = call.client(), call.text("group")
        position, unique_key = call.number("offset"), call.frame.fields.get("originMsgId", "")
        for queue in client.queues_of(group):
            taken = queue.take_at(position, unique_key)
            if taken is not None:
                level, most = call.number("delayLevel", 0), call.number("maxReconsumeTimes", -1)
                dead = level < 0 or 0 <= most < taken.attempt
                await self._settle(queue, taken, client, dead=dead, level=level)
                return call.frame.answered(ResultCode.SUCCESS)
        # The client then sends the message with its properties, and so with its handle.
        raise RemotingRefused(ResultCode.SYSTEM_ERROR, "This client does not hold the message here.")

    async def by_handle(self, call: RemotingCall, fields: SendFields) -> RemotingFrame:
        """Give back a message that is sent to its group's topic of retries. Raises CallRefused, RemotingRefused."""
        properties = read_properties(fields.properties)
        handle, topic = properties.get(HANDLE), properties.get("RETRY_TOPIC")
        if not handle or not topic:
            raise RemotingRefused(ResultCode.MESSAGE_ILLEGAL, "The message is none that Halfnote gave to a consumer.")
        group = fields.topic.removeprefix(RETRY)
        counted, most = fields.reconsume_times, fields.max_reconsume_times
        # A concurrent consumer has counted this attempt already. An orderly one has not, and sends back only after its
        # last attempt.
        dead = 0 <= most < counted or (0 <= most == counted and self._clients.is_locked(group, call.keys))
        client = call.connection.client
        for queue in client.queues_of(group) if client is not None and client.keys == call.keys else ():
            if client is not None and (taken := queue.take_handle(handle)) is not None:
                await self._settle(queue, taken, client, dead=dead, level=0)
                break
        else:
            name = subscription_of(group, topic_of(with_namespace(topic, group)))
            await self._settle_handle(name, handle, call, dead=dead)
        place = {"msgId": message_id(call.connection.host, 0), "queueId": fields.queue_id, "queueOffset": 0}
        return call.frame.answered(ResultCode.SUCCESS, fields=place)

    async def _settle(
        self, queue: ClaimQueue, taken: HeldDelivery, client: RemotingClient, *, dead: bool, level: int
    ) -> None:
        how, more = _how(dead=dead, level=level)
        try:
            (refused,) = await self._claiming.settle(queue.subscription, client.keys, how, [taken.handle], **more)
            if refused is not None and refused.for_now:
                raise refused
        except (CallRefused, asyncio.CancelledError):
            # The client gives it back again, unless it left meanwhile.
            if not client.hold_again(queue, [taken]):
                self._renewals.settled([taken.handle])
            raise
        # One that was not held any longer comes again by itself.
        self._renewals.settled([taken.handle])

    async def _settle_handle(self, name: str, handle: str, call: RemotingCall, *, dead: bool) -> None:
        how, more = _how(dead=dead, level=0)
        (refused,) = await self._claiming.settle(name, call.keys, how, [handle], **more)
        if refused is not None and (refused.for_now or refused.slug == "handle-invalid"):
            raise refused
        self._renewals.settled([handle])


def _how(*, dead: bool, level: int) -> tuple[str, dict[str, Any]]:
    if dead:
        return "reject", _SAID_DEAD
    return "nack", {**_SAID_AGAIN, **({"retry_after_s": delay_s(level)} if level > 0 else {})}
