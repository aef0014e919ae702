"""Heartbeats: which groups a client has. And which consumers divide the queues of a group among them.

Halfnote gives each message to one consumer, so no queue is divided: each client learns only of itself, and has all
queues for its own. The messages in them are those that the gateway claims for it.
"""

import asyncio
import json
from collections.abc import Mapping
from itertools import count
from typing import Any

import structlog

from app.rocketmq.claiming import Claiming
from app.rocketmq.filters import Filters, filters_of
from app.rocketmq.leaving import LEAVE_S
from app.rocketmq.protocol.definition_pb2 import FilterExpression, FilterType
from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.codes import RemotingRefused, RequestCode, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame, oneway
from app.rocketmq.remoting.group_filters import changed_filters, filter_as_said
from app.rocketmq.remoting.names import RETRY, subscription_of, topic_of
from app.rocketmq.remoting.remoting_clients import GroupMember, RemotingClient, RemotingClients, named_producers
from app.rocketmq.remoting.requests import RemotingCall
from app.rocketmq.remoting.routes import QUEUES
from app.rocketmq.renewals import Renewals
from app.rocketmq.subscriptions import Subscriptions

log = structlog.get_logger(__name__)

CLIENT_ID_MAX = 500
# Characters of a refused heartbeat's text that its connection keeps.
_TEXT_MAX = 1000
_FROM_FIRST = "CONSUME_FROM_FIRST_OFFSET"
_numbers = count(1)


class Membership:
    """Answers heartbeats, lists of consumers, locks, and clients that leave."""

    def __init__(
        self,
        clients: RemotingClients,
        subscriptions: Subscriptions,
        claiming: Claiming,
        renewals: Renewals,
        topics_max: int,
    ) -> None:
        self._clients, self._subscriptions, self._claiming, self._renewals = clients, subscriptions, claiming, renewals
        self._topics_max = topics_max
        # Each group names the topic of its retries as well, and each client its own producer.
        self._list_max = topics_max + 1
        self._leaving: set[asyncio.Task[None]] = set()

    async def heartbeat(self, call: RemotingCall) -> RemotingFrame:
        """Connect the client with the groups that it has. Raises CallRefused, RemotingRefused."""
        try:
            answer = await self._heartbeat(call)
        except (CallRefused, RemotingRefused) as refused:
            # The client's owner does not learn it from a heartbeat, but from what needs one.
            call.connection.heartbeat_refused = refused.text[:_TEXT_MAX]
            raise
        call.connection.heartbeat_refused = None
        return answer

    async def _heartbeat(self, call: RemotingCall) -> RemotingFrame:
        content = call.body()
        client_id = str(content.get("clientID") or "")
        if not 0 < len(client_id) <= CLIENT_ID_MAX:
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, "The heartbeat has no id of its client.")
        producers = named_producers([str(one["groupName"]) for one in self._objects(content, "producerDataSet")])
        consumers = {str(one["groupName"]): self._member(one) for one in self._objects(content, "consumerDataSet")}
        known = call.connection.client
        if known is not None and known.client_id != client_id:
            raise RemotingRefused(
                ResultCode.SYSTEM_ERROR,
                f"This connection is of the client `{known.client_id}`. A client connects by itself.",
            )
        former = self._clients.consumers_of(client_id, call.keys, call.connection)
        now = {**self._clients.consumers_beside(client_id, call.keys, call.connection), **consumers}
        self._count(producers, now)
        client = self._clients.connect(client_id, call.keys, call.connection)
        call.connection.client = client
        client.consumers = now
        client.has_producers(producers)
        client.unready |= changed_filters(former, consumers)
        self._let_go(client)
        self._clients.on_change()
        for group in consumers:
            await self._subscribe(group, client)
            if group not in former:
                # The client asks for its queues at once, and not at its next turn.
                call.connection.send(
                    oneway(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, next(_numbers), {"consumerGroup": group})
                )
        return call.frame.answered(ResultCode.SUCCESS)

    def _count(self, producers: Mapping[str, str], consumers: Mapping[str, GroupMember]) -> None:
        # Each group names the topic of its retries. One without another topic counts as one.
        topics = sum(
            max(1, sum(topic != f"{RETRY}{group}" for topic in member.filters)) for group, member in consumers.items()
        )
        if (named := len(producers) + topics) > self._topics_max:
            raise RemotingRefused(
                ResultCode.SYSTEM_ERROR,
                f"This client names {named:,} groups and topics; {self._topics_max:,} are the most "
                "(--max-topics). Use several clients.",
            )

    async def consumers(self, call: RemotingCall) -> RemotingFrame:
        """Name the client itself. Raises RemotingRefused if it has no such group."""
        client = call.client()
        group = call.text("consumerGroup")
        if group not in client.consumers:
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, f"This client has no consumer of the group `{group}`.")
        body = json.dumps({"consumerIdList": [client.client_id]}).encode()
        return call.frame.answered(ResultCode.SUCCESS, body=body)

    async def lock(self, call: RemotingCall) -> RemotingFrame:
        """Lock the client's own queues, and give the messages of a key in their order. Raises RemotingRefused."""
        client, content = call.client(), call.body()
        group = str(content.get("consumerGroup") or "")
        member = client.consumers.get(group)
        if member is None:
            raise RemotingRefused(ResultCode.SUBSCRIPTION_NOT_EXIST, f"This client has no group `{group}`.")
        queues = self._objects(content, "mqSet", QUEUES)
        client.lock(group)
        for topic in {str(one.get("topic")) for one in queues}:
            if topic in member.filters and not topic.startswith(RETRY):
                name, filters = subscription_of(group, topic_of(topic)), member.filters[topic]
                await self._subscriptions.order_by_key(name, topic_of(topic), call.keys, filters, member.start)
        return call.frame.answered(ResultCode.SUCCESS, body=json.dumps({"lockOKMQSet": queues}).encode())

    async def unlock(self, call: RemotingCall) -> RemotingFrame:
        """Answer a client that needs its queues no longer."""
        return call.frame.answered(ResultCode.SUCCESS)

    async def check_configuration(self, call: RemotingCall) -> RemotingFrame:
        """Say before a consumer starts whether its filter can be used. Raises CallRefused."""
        given = call.body().get("subscriptionData")
        if isinstance(given, dict):
            filters_of(_expression(given))
        return call.frame.answered(ResultCode.SUCCESS)

    async def leave(self, call: RemotingCall) -> RemotingFrame:
        """Forget a group of a client, and let come again what it holds. Raises RemotingRefused."""
        client = call.client()
        producer, consumer = call.frame.fields.get("producerGroup"), call.frame.fields.get("consumerGroup")
        if producer:
            client.has_producers({name: group for name, group in client.producers.items() if group != producer})
            self._clients.on_change()
        if consumer and client.consumers.pop(consumer, None) is not None:
            self._let_go(client)
        return call.frame.answered(ResultCode.SUCCESS)

    async def stop(self) -> None:
        """Wait until what clients left within LEAVE_S is being given back."""
        if self._leaving:
            await asyncio.wait(self._leaving)

    def _let_go(self, client: RemotingClient) -> None:
        """Forget the queues of groups and topics that a client has left. What it holds of them comes again soon."""
        client.unready = {(group, topic) for group, topic in client.unready if client.names(group, topic)}
        former = client.former_queues()
        client.forget(queue for queue in former if not len(queue))
        if any(len(queue) for queue in former):
            leaving = asyncio.create_task(self._give_back(client))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _give_back(self, client: RemotingClient) -> None:
        # The client of 5.x may send the last offsets after it has left a group or a topic.
        await asyncio.sleep(LEAVE_S)
        # It may have come back, and has then said where it begins.
        former = client.former_queues()
        client.forget(former)
        for queue in former:
            handles = [one.handle for one in queue.take_from(0)]
            self._renewals.settled(handles)
            self._claiming.give_back(queue.subscription, client.keys, handles, "the consumer left")

    async def _subscribe(self, group: str, client: RemotingClient) -> None:
        for topic in sorted(topic for one, topic in client.unready if one == group):
            try:
                await filter_as_said(self._subscriptions, client, group, topic)
            except CallRefused as refused:
                # A heartbeat that is refused says nothing to the client's owner. The answers to its pulls do.
                log.warning("rocketmq_subscription_not_ready", group=group, topic=topic, error=refused.text)

    def _objects(self, content: Mapping[str, Any], name: str, each: int = 1) -> list[dict[str, Any]]:
        """Return a list of objects. `each`: how many a topic may have."""
        given = content.get(name) or []
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            raise RemotingRefused(ResultCode.SYSTEM_ERROR, f"`{name}` is no list of objects.")
        if len(given) > (most := self._list_max * each):
            raise RemotingRefused(
                ResultCode.SYSTEM_ERROR,
                f"`{name}` has {len(given):,} entries; {most:,} are the most (--max-topics). Use several clients.",
            )
        return given

    def _member(self, given: Mapping[str, Any]) -> GroupMember:
        filters: dict[str, Filters] = {}
        for one in self._objects(given, "subscriptionDataSet"):
            topic = str(one.get("topic"))
            try:
                filters[topic] = filters_of(_expression(one))
            except CallRefused as refused:
                log.warning("rocketmq_filter_not_possible", topic=topic, error=refused.text)
        return GroupMember(
            given.get("messageModel") == "BROADCASTING",
            "earliest" if given.get("consumeFromWhere") == _FROM_FIRST else "latest",
            filters,
        )


def _expression(given: Mapping[str, Any]) -> FilterExpression:
    kind = FilterType.SQL if given.get("expressionType") == "SQL92" else FilterType.TAG
    return FilterExpression(expression=str(given.get("subString") or "*"), type=kind)
