"""Pulls of push consumers, as claims; and the offsets that they commit, as acknowledgements."""

import asyncio
import time
from collections.abc import Sequence
from itertools import count

import structlog

from app.rocketmq.answer_sizes import BATCH_MAX
from app.rocketmq.claiming import Claiming
from app.rocketmq.receiving import ClaimedDelivery
from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.claim_queues import ClaimQueue, HeldDelivery
from app.rocketmq.remoting.codes import RemotingRefused, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.group_filters import filter_as_said
from app.rocketmq.remoting.names import RETRY, subscription_of, topic_of
from app.rocketmq.remoting.read_messages import claimed_message, message_id_of
from app.rocketmq.remoting.remoting_clients import GroupMember, RemotingClient
from app.rocketmq.remoting.requests import RemotingCall
from app.rocketmq.remoting.routes import QUEUES
from app.rocketmq.remoting.store_format import encode_message
from app.rocketmq.renewals import Renewals
from app.rocketmq.subscriptions import Subscriptions

log = structlog.get_logger(__name__)

# A client works on what it has before it gets more, so that another one can take the rest.
HELD_MAX = 64
POLL_MOST_S = 20.0
# A client says with its next pull what it has done. While it holds messages, it is asked to pull soon.
POLL_HOLDING_S = 0.5
_COMMITS, _WAITS = 0x1, 0x2
# Places in the commit log: never the same twice, in this process and in those before it.
_positions = count(int(time.time() * 1000) << 20)


class Pulling:
    """Answers pulls, and offsets."""

    def __init__(self, claiming: Claiming, subscriptions: Subscriptions, renewals: Renewals) -> None:
        self._claiming, self._subscriptions, self._renewals = claiming, subscriptions, renewals

    async def pull(self, call: RemotingCall) -> RemotingFrame:
        """Return messages for a queue; wait for one if the client does. Raises CallRefused, RemotingRefused."""
        client, group, topic = call.client(), call.text("consumerGroup"), call.text("topic")
        queue_id, offset = call.number("queueId"), call.number("queueOffset")
        flag = call.number("sysFlag", 0)
        wait_s = min(max(call.number("suspendTimeoutMillis", 0) / 1000, 0.0), POLL_MOST_S) if flag & _WAITS else 0.0
        if not _is_queue(queue_id) or not 0 <= offset < 2**62:
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, f"There is no offset {offset} of a queue {queue_id}.")
        if topic.startswith(RETRY):
            await asyncio.sleep(wait_s)
            return _nothing(call, offset)
        member = _member(call, client, group, topic)
        ordered = await self._ordered(call, group, topic, member)
        queue = client.queue(group, topic, queue_id)
        if queue is not None and not queue.gave(offset):
            # The client was at another process since, and may not have got the last answer of this one, or have begun
            # again there. Its offset does not say what it did with the messages that were given out here.
            self._drop(queue, client, "the consumer went on by another gateway")
            queue = None
        if queue is None:
            if ordered and offset > 0:
                # Another process numbered what the client holds, and its claims may be over. The client drops that
                # and begins again. So it works on no message that another consumer has.
                return call.frame.answered(ResultCode.PULL_OFFSET_MOVED, "begin again", _offsets(offset, 0))
            queue = client.begin(group, topic, queue_id, subscription_of(group, topic_of(topic)), offset)
        async with queue.pulling:
            if flag & _COMMITS:
                await self._commit(queue, call.number("commitOffset", 0), client)
            if ordered and any(handle not in self._renewals for handle in queue.handles):
                # Another consumer may work on a message of a key that this client holds. The client drops what it
                # holds and begins again, which gives back the rest. An offset above would acknowledge that.
                first = queue.first_offset
                return call.frame.answered(ResultCode.PULL_OFFSET_MOVED, "begin again", _offsets(first, first))
            await filter_as_said(self._subscriptions, client, group, topic)
            return await self._claimed(call, client, queue, offset, wait_s)

    async def committed(self, call: RemotingCall) -> RemotingFrame:
        """Return where a queue goes on; the client has none of its messages. Raises CallRefused, RemotingRefused."""
        client, group, topic = call.client(), call.text("consumerGroup"), call.text("topic")
        if topic.startswith(RETRY):
            return call.frame.answered(ResultCode.SUCCESS, fields={"offset": 0})
        member, queue_id = _member(call, client, group, topic), call.number("queueId")
        if not _is_queue(queue_id):
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, f"There is no queue {queue_id}.")
        try:
            await self._ordered(call, group, topic, member)
        except CallRefused as refused:
            # The offset is the client's own, so it can begin while Halfnote is away.
            if not refused.for_now:
                raise
        former = client.queue(group, topic, queue_id)
        if former is not None:
            self._drop(former, client, "the consumer began again")
        queue = client.begin(group, topic, queue_id, subscription_of(group, topic_of(topic)))
        return call.frame.answered(ResultCode.SUCCESS, fields={"offset": queue.next_offset})

    async def commit(self, call: RemotingCall) -> RemotingFrame:
        """Acknowledge what is below an offset. Raises CallRefused, RemotingRefused."""
        client = call.client()
        queue = client.queue(call.text("consumerGroup"), call.text("topic"), call.number("queueId"))
        if queue is not None:
            await self._commit(queue, call.number("commitOffset"), client)
        return call.frame.answered(ResultCode.SUCCESS)

    async def edge(self, call: RemotingCall) -> RemotingFrame:
        """Return the first or last offset of a queue: clients have offsets of their own, so there is none yet."""
        return call.frame.answered(ResultCode.SUCCESS, fields={"offset": 0})

    async def _ordered(self, call: RemotingCall, group: str, topic: str, member: GroupMember) -> bool:
        """Return whether the subscription is ordered. Raises CallRefused, as for a key without the right to it."""
        halfnote_topic = topic_of(topic)
        name = subscription_of(group, halfnote_topic)
        shape = await self._subscriptions.of(name, halfnote_topic, call.keys, member.filters[topic], member.start)
        return bool(shape["ordered"] == "key")

    async def _claimed(
        self, call: RemotingCall, client: RemotingClient, queue: ClaimQueue, offset: int, wait_s: float
    ) -> RemotingFrame:
        # An answer that did not arrive: the client asks for the same offset again.
        self._give_back(queue, client, queue.go_on(offset), "the consumer did not get the answer")
        if len(queue) >= HELD_MAX:
            await asyncio.sleep(min(wait_s, POLL_HOLDING_S))
            return _nothing(call, offset)
        claimed = await self._claiming.claim(
            queue.subscription,
            client.keys,
            most=min(max(call.number("maxMsgNums", BATCH_MAX), 1), queue.most, HELD_MAX - len(queue)),
            held_s=None,
            wait_s=min(wait_s, POLL_HOLDING_S) if len(queue) else wait_s,
            buffered=call.buffered,
        )
        if not claimed:
            return _nothing(call, offset)
        # If the client left the group or the topic meanwhile, no consumer works on them, and renewals would hold them.
        if not (call.connection.takes_answers and client.still_has(queue)):
            handles, why = [one.handle for one in claimed], "the consumer left before it got the message"
            self._claiming.give_back_unsent(queue.subscription, client.keys, handles, why)
            return _nothing(call, offset)
        return self._found(call, client, queue, claimed)

    def _found(
        self, call: RemotingCall, client: RemotingClient, queue: ClaimQueue, claimed: Sequence[ClaimedDelivery]
    ) -> RemotingFrame:
        offset = queue.next_offset
        _, topic, queue_id = queue.name
        held: list[HeldDelivery] = []
        parts: list[bytes] = []
        body_bytes = 0
        failed_keys: set[str] = set()
        after: list[str] = []
        for one, position in zip(claimed, _positions, strict=False):
            if one.key in failed_keys:
                after.append(one.handle)
                continue
            try:
                message = claimed_message(one, topic, queue_id, offset + len(held), position)
                parts.append(encode_message(message, call.connection.host))
                body_bytes += len(message.body)
            except Exception as error:
                log.exception("rocketmq_message_not_encoded", message_id=one.message_id, topic=topic)
                self._give_back_failed(queue, client, one.handle, error)
                if one.key is not None:
                    failed_keys.add(one.key)
                continue
            held.append(HeldDelivery(offset + len(held), position, message_id_of(one), one.handle, one.attempt))
        why = "the gateway could not encode a message of its key before it"
        self._claiming.give_back_unsent(queue.subscription, client.keys, after, why)
        if not held:
            return _nothing(call, offset)
        queue.answer(held, body_bytes)
        handles = [one.handle for one in held]
        self._renewals.hold(handles, client.name, queue.subscription, client.keys, self._claiming.held_s)
        fields = _offsets(queue.next_offset, queue.next_offset)
        return call.frame.answered(ResultCode.SUCCESS, "FOUND", fields, b"".join(parts))

    def _give_back_failed(self, queue: ClaimQueue, client: RemotingClient, handle: str, error: Exception) -> None:
        """Give back a message that has no form for the client, as a failed attempt."""
        why = f"the gateway cannot encode it: {str(error)[:500]}"
        self._claiming.give_back(queue.subscription, client.keys, [handle], why, retry_after_s=None)

    async def _commit(self, queue: ClaimQueue, offset: int, client: RemotingClient) -> None:
        # An offset that was not given here is of another process.
        done = queue.take_below(offset) if queue.gave(offset) else []
        if not done:
            return
        handles = [one.handle for one in done]
        try:
            refusals = await self._claiming.settle(queue.subscription, client.keys, "ack", handles)
        except (CallRefused, asyncio.CancelledError):
            # The client commits this offset again.
            if not client.hold_again(queue, done):
                self._renewals.settled(handles)
            raise
        again = [one for one, refused in zip(done, refusals, strict=True) if refused is not None and refused.for_now]
        if not client.hold_again(queue, again):
            again = []
        self._renewals.settled({*handles} - {one.handle for one in again})
        for refused in refusals:
            if refused is not None and refused.for_now:
                raise refused

    def _drop(self, queue: ClaimQueue, client: RemotingClient, why: str) -> None:
        """Forget a queue of which the client has nothing any more. What it held, or is being settled, comes again."""
        self._give_back(queue, client, queue.take_from(0), why)
        client.forget([queue])

    def _give_back(self, queue: ClaimQueue, client: RemotingClient, taken: Sequence[HeldDelivery], why: str) -> None:
        handles = [one.handle for one in taken]
        self._renewals.settled(handles)
        self._claiming.give_back(queue.subscription, client.keys, handles, why)


def _is_queue(queue_id: int) -> bool:
    return 0 <= queue_id < QUEUES


def _member(call: RemotingCall, client: RemotingClient, group: str, topic: str) -> GroupMember:
    member = client.consumers.get(group)
    if member is None:
        text = call.after_heartbeat(f"This client has no consumer of the group `{group}`.")
        raise RemotingRefused(ResultCode.SUBSCRIPTION_NOT_EXIST, text)
    if member.broadcasting:
        raise RemotingRefused(
            ResultCode.NO_PERMISSION,
            "Halfnote has no broadcasting: give each of these consumers a group of its own, with clustering.",
        )
    if topic not in member.filters:
        text = f"The group `{group}` does not subscribe to `{topic}`, or by a filter that Halfnote does not have."
        raise RemotingRefused(ResultCode.SUBSCRIPTION_PARSE_FAILED, call.after_heartbeat(text))
    return member


def _nothing(call: RemotingCall, offset: int) -> RemotingFrame:
    return call.frame.answered(ResultCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", _offsets(offset, offset))


def _offsets(following: int, most: int) -> dict[str, object]:
    return {"suggestWhichBrokerId": 0, "nextBeginOffset": following, "minOffset": 0, "maxOffset": most}
