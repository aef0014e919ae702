"""Calls by which clients connect, say what they do, and leave."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import structlog

from app.rocketmq.calls import ClientCall
from app.rocketmq.client_settings import consumer_settings, producer_settings
from app.rocketmq.clients import ConnectedClient, ConnectedClients
from app.rocketmq.filters import filters_of
from app.rocketmq.leaving import Leaving
from app.rocketmq.names import subscription_of, topic_of
from app.rocketmq.protocol.definition_pb2 import (
    Assignment,
    Broker,
    ClientType,
    Code,
    Endpoints,
    MessageQueue,
    MessageType,
    Permission,
    Resource,
    Settings,
)
from app.rocketmq.protocol.service_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    NotifyClientTerminationRequest,
    NotifyClientTerminationResponse,
    QueryAssignmentRequest,
    QueryAssignmentResponse,
    QueryRouteRequest,
    QueryRouteResponse,
    TelemetryCommand,
)
from app.rocketmq.refusals import OK_STATUS, CallRefused
from app.rocketmq.request_limits import RequestLimits
from app.rocketmq.subscriptions import Shape, Subscriptions

log = structlog.get_logger(__name__)

BROKER = "halfnote"
# gRPC says in two parts that a connection broke: that nothing more comes, and then that the call is canceled.
BREAK_FOLLOWS_S = 1.0
# What a consumer gets that subscribes to nothing yet.
_NO_SUBSCRIPTION: Shape = {"retry": [10.0], "ordered": "none"}


class ClientSessions:
    """Routes, and the streams of connected clients."""

    def __init__(
        self, clients: ConnectedClients, subscriptions: Subscriptions, leaving: Leaving, limits: RequestLimits
    ) -> None:
        self._clients, self._subscriptions, self._leaving, self._limits = clients, subscriptions, leaving, limits

    async def route(self, request: QueryRouteRequest, call: ClientCall) -> QueryRouteResponse:
        """Return one queue, at the address by which the client came. Raises CallRefused."""
        topic_of(request.topic)
        return QueryRouteResponse(status=OK_STATUS, message_queues=[_queue(request.topic, request.endpoints, 0)])

    async def assignment(self, request: QueryAssignmentRequest, call: ClientCall) -> QueryAssignmentResponse:
        """Assign the queue to every consumer: Halfnote gives each message to one of them. Raises CallRefused."""
        subscription_of(request.group, topic_of(request.topic))
        queue = _queue(request.topic, request.endpoints, -1)
        return QueryAssignmentResponse(status=OK_STATUS, assignments=[Assignment(message_queue=queue)])

    async def heartbeat(self, request: HeartbeatRequest, call: ClientCall) -> HeartbeatResponse:
        """Answer a client that is connected here. Raises CallRefused for another."""
        self._connected(call)
        return HeartbeatResponse(status=OK_STATUS)

    async def leave(self, request: NotifyClientTerminationRequest, call: ClientCall) -> NotifyClientTerminationResponse:
        """Forget a client, and let come again what it holds. Raises CallRefused if it is not connected here."""
        self._clients.leave(self._connected(call))
        self._leaving.left(call.client_id, call.keys)
        return NotifyClientTerminationResponse(status=OK_STATUS)

    async def telemetry(
        self, commands: AsyncIterator[TelemetryCommand], call: ClientCall
    ) -> AsyncGenerator[TelemetryCommand, None]:
        """Answer settings, and send checks, until the client leaves. Raises CallRefused."""
        client, broke = self._clients.opened(call), True
        reader = asyncio.create_task(self._read(commands, client))
        reader.add_done_callback(lambda _: client.end())
        try:
            while (command := await client.next_command()) is not None:
                yield command
                client.taken()
            if reader.done():
                self._clients.remove(client)
                await self._ended_by_client(reader)
            broke = False
        except CallRefused:
            broke = False
            raise
        finally:
            self._clients.remove(client)
            client.left(broke=broke)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reader

    async def _ended_by_client(self, reader: "asyncio.Task[None]") -> None:
        """Return if the client ended its stream in order. Raises CallRefused if what it sent ends the stream.

        If the connection broke, the call is canceled meanwhile: gRPC says first that nothing more comes.
        """
        if not reader.cancelled() and (error := reader.exception()) is not None:
            raise error
        await asyncio.sleep(BREAK_FOLLOWS_S)

    async def _read(self, commands: AsyncIterator[TelemetryCommand], client: ConnectedClient) -> None:
        async for command in commands:
            if command.WhichOneof("command") == "settings":
                answer = await self._settled(command.settings, client)
                client.send(TelemetryCommand(status=OK_STATUS, settings=answer))
                # A client that does not read gets no further answers, which would wait in memory.
                await client.all_taken()

    async def _settled(self, settings: Settings, client: ConnectedClient) -> Settings:
        """Connect a client as its settings say, or change them; return the settings that it gets."""
        named = len(settings.publishing.topics) + len(settings.subscription.subscriptions)
        if named > self._limits.topics:
            raise CallRefused(
                Code.BAD_REQUEST,
                f"The settings name {named:,} topics; {self._limits.topics:,} are the most (--max-topics). Use several "
                "clients.",
            )
        which = settings.WhichOneof("pub_sub")
        if which == "publishing":
            topics = {topic_of(resource): resource for resource in settings.publishing.topics}
            answer = producer_settings(settings, self._limits.body_bytes)
        elif which == "subscription":
            topics = {}
            answer = consumer_settings(settings, await self._subscribed(settings, client))
            if client.fifo is None and settings.client_type != ClientType.SIMPLE_CONSUMER:
                client.fifo = self._clients.calls_in_order(client, told=answer.subscription.fifo)
        else:
            raise CallRefused(Code.UNRECOGNIZED_CLIENT_TYPE, "These settings are of no producer and no consumer.")
        client.settings, client.topics = settings, topics
        self._clients.add(client)
        return answer

    async def _subscribed(self, settings: Settings, client: ConnectedClient) -> Shape:
        """Set up the subscriptions; return the shape of the last, ordered if one of them is.

        A client has one way to call its handler for all its topics, and in order it loses only time.
        """
        shape, ordered = _NO_SUBSCRIPTION, False
        # Only of the topics that the client names now.
        former, client.expressions = client.expressions, {}
        for entry in settings.subscription.subscriptions:
            topic = topic_of(entry.topic)
            name = subscription_of(settings.subscription.group, topic)
            filters = filters_of(entry.expression)
            said = entry.expression.SerializeToString(deterministic=True).hex()
            try:
                if former.get(name) != said:
                    await self._subscriptions.filter_by(name, topic, client.keys, filters)
                client.expressions[name] = said
                await self._subscriptions.of(name, topic, client.keys, filters)
            except CallRefused as refused:
                # A client whose settings are not answered does not start. The answers to its claims say what is wrong.
                log.warning("rocketmq_subscription_not_ready", subscription=name, error=refused.text)
            if (seen := self._subscriptions.seen(name, client.keys)) is not None:
                shape, ordered = seen, ordered or seen["ordered"] == "key"
        return {**shape, "ordered": "key" if ordered else "none"}

    def _connected(self, call: ClientCall) -> ConnectedClient:
        client = self._clients.get(call.client_id, call.keys)
        if client is None:
            raise CallRefused(Code.UNRECOGNIZED_CLIENT_TYPE, "This client has no open stream with its settings here.")
        return client


def _queue(topic: Resource, endpoints: Endpoints, number: int) -> MessageQueue:
    if not endpoints.addresses:
        raise CallRefused(Code.ILLEGAL_ACCESS_POINT, "The request does not say by which address the client came.")
    return MessageQueue(
        topic=topic,
        id=number,
        permission=Permission.READ_WRITE,
        broker=Broker(name=BROKER, id=0, endpoints=endpoints),
        accept_message_types=[MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION],
    )
