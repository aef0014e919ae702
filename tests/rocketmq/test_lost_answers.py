"""Answers that a connection loses after the gateway has written them: their messages are not renewed.

The client may have them, so they are not given back at once either. They come again when their time is over.
"""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq import renewals
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.protocol.definition_pb2 import PUSH_CONSUMER
from app.rocketmq.protocol.service_pb2 import HeartbeatRequest, NotifyClientTerminationRequest, TelemetryCommand
from app.runtime.state import Runtime
from tests.rocketmq.test_consuming import LEASED_UNTIL, acked, handle_of, left, received, sent
from tests.support.consumers import lapse
from tests.support.gateway import (
    LIMITS,
    GatewayInProcess,
    RocketClient,
    codes_of,
    consumer_of,
    gateway_over,
    message_of,
    receive_of,
)

WITHIN_S = 30.0
ROUNDS = 10


class Link:
    """Connections to a gateway, which may lose what the gateway writes, and break."""

    def __init__(self, port: int) -> None:
        self._to, self.loses = port, False
        self.lost = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._pipes: list[asyncio.Task[None]] = []
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def break_off(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_read, to_write = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, to_write]
        self._pipes += [
            asyncio.create_task(self._pipe(reader, to_write, answers=False)),
            asyncio.create_task(self._pipe(to_read, writer, answers=True)),
        ]

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while content := await reader.read(65_536):
                if answers and self.loses:
                    self.lost += len(content)
                    continue
                writer.write(content)
                await writer.drain()
        except ConnectionError:
            pass
        writer.transport.abort()


@pytest.fixture
async def gateway(client: httpx.AsyncClient) -> AsyncIterator[tuple[GatewayInProcess, grpc.aio.Channel]]:
    async with gateway_over(client._transport) as both:
        yield both


@pytest.fixture
async def link(gateway: tuple[GatewayInProcess, grpc.aio.Channel]) -> AsyncIterator[Link]:
    link = Link(gateway[0].port)
    server = await link.start()
    yield link
    link.break_off()
    server.close()
    await asyncio.gather(*link._pipes, return_exceptions=True)


async def answered(parts: GatewayInProcess) -> None:
    """Wait until the gateway has written an answer with messages, and its call is over."""
    async with asyncio.timeout(WITHIN_S):
        # The stream of settings is a call too.
        while not len(parts.renewals) or sum(parts.connections._calls.values()) > 1:
            await asyncio.sleep(0.01)


async def test_messages_of_an_answer_that_the_connection_lost_are_not_renewed(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], link: Link, db: Connection, runtime: Runtime
) -> None:
    parts, channel = gateway
    async with grpc.aio.insecure_channel(f"127.0.0.1:{link.port}") as lossy:
        rocket = RocketClient(lossy)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        await sent(rocket, message_of("order", b"x"))
        link.loses = True
        receiving = asyncio.create_task(rocket.receive(receive_of("points", "order", auto_renew=True)))
        await answered(parts)
        async with asyncio.timeout(WITHIN_S):
            while not link.lost:
                await asyncio.sleep(0.01)
        link.break_off()
        with pytest.raises(grpc.aio.AioRpcError):
            await receiving
        assert not stream.cancel()
        await left(parts, rocket)
    # It is back in time, and would hold the message for hours.
    again = RocketClient(channel)
    again.client_id = again._metadata["x-mq-client-id"] = rocket.client_id
    stream, _ = await again.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    assert parts.clients.get(rocket.client_id, ApiKeys(None, None)) is not None
    leased_until = await db.fetchval(LEASED_UNTIL)
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
    assert await db.fetchval(LEASED_UNTIL) == leased_until
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S + 1)
    assert len(parts.renewals) == 0
    # The client may have got it, so it does not come before its time is over.
    assert await received(again, auto_renew=True) == []
    await lapse(db, runtime)
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    assert [one.body for one in await received(again, auto_renew=True)] == [b"x"]
    stream.cancel()


async def test_what_a_client_surely_got_is_renewed_when_it_comes_back(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel],
) -> None:
    """It settled a message of the answer, or of one that the connection brought later."""
    parts, channel = gateway
    rocket = RocketClient(channel)
    stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    bodies = [b"1", b"2", b"3", b"4"]
    for body in bodies[:2]:
        await sent(rocket, message_of("order", body))
    first = await received(rocket, auto_renew=True)
    for body in bodies[2:]:
        await sent(rocket, message_of("order", body))
    second = await received(rocket, auto_renew=True)
    assert sorted(one.body for one in [*first, *second]) == bodies
    assert await acked(rocket, handle_of(second[0])) == ["OK", "OK"]
    await sent(rocket, message_of("order", b"5"))
    [unsure] = await received(rocket, auto_renew=True)
    stream.cancel()
    await left(parts, rocket)
    stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    before = {handle: one.until for handle, one in parts.renewals._held.items()}
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
    renewed = {handle for handle, one in parts.renewals._held.items() if one.until > before[handle]}
    assert renewed == {handle_of(one) for one in (*first, *second[1:])}
    # It names the message after all.
    parts.renewals.settling([handle_of(unsure)])
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
    assert parts.renewals._held[handle_of(unsure)].until > before[handle_of(unsure)]
    stream.cancel()


@pytest.mark.parametrize("end", ["by the client", "after another one began", "by the gateway"])
async def test_messages_are_renewed_after_a_stream_that_ended_in_order(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], end: str
) -> None:
    """The connection of such a stream is whole, and brings the answer."""
    parts, channel = gateway
    rocket = RocketClient(channel)
    settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
    stream, _ = await rocket.connect(settings)
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket, auto_renew=True)
    if end == "by the gateway":
        # One message more than a stream may send in a minute, of which the first is sent.
        for _ in range(LIMITS.settings_per_minute):
            await stream.write(TelemetryCommand())
        assert await stream.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await left(parts, rocket)
        again, _ = await rocket.connect(settings)
    else:
        if end == "after another one began":
            again, _ = await rocket.connect(settings)
        await stream.done_writing()
        async with asyncio.timeout(WITHIN_S):
            assert await stream.code() == grpc.StatusCode.OK
        if end == "by the client":
            await left(parts, rocket)
            again, _ = await rocket.connect(settings)
    held = parts.renewals._held[handle_of(message)]
    before = held.until
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
    assert held.until > before
    again.cancel()


async def test_a_client_stays_connected_by_an_older_stream_when_its_newer_one_ends(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], link: Link
) -> None:
    """It has one for each address, and both addresses may lead to one gateway."""
    parts, channel = gateway
    async with grpc.aio.insecure_channel(f"127.0.0.1:{link.port}") as other_channel:
        rocket, other = RocketClient(channel), RocketClient(other_channel)
        other.client_id = other._metadata["x-mq-client-id"] = rocket.client_id
        settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
        stream, _ = await rocket.connect(settings)
        older = parts.clients.get(rocket.client_id, ApiKeys(None, None))
        newer_stream, _ = await other.connect(settings)
        newer = parts.clients.get(rocket.client_id, ApiKeys(None, None))
        assert older is not None
        assert newer is not None
        assert newer is not older
        newer_stream.cancel()
        async with asyncio.timeout(WITHIN_S):
            while newer.connection.broke_at is None:
                await asyncio.sleep(0.01)
        assert parts.clients.get(rocket.client_id, ApiKeys(None, None)) is older
        assert codes_of([await rocket.call("Heartbeat", HeartbeatRequest())]) == ["OK"]
        # And not by one that it ended itself.
        assert codes_of([await rocket.call("NotifyClientTermination", NotifyClientTerminationRequest())]) == ["OK"]
        assert parts.clients.get(rocket.client_id, ApiKeys(None, None)) is None
        stream.cancel()


@pytest.mark.parametrize("breaks", ["its own", "the other"])
async def test_an_answer_is_lost_with_the_connection_that_brought_it(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], link: Link, breaks: str
) -> None:
    """A client has a connection to each address, and two addresses may lead to one gateway."""
    parts, channel = gateway
    async with grpc.aio.insecure_channel(f"127.0.0.1:{link.port}") as breaking:
        rocket, other = RocketClient(breaking), RocketClient(channel)
        other.client_id = other._metadata["x-mq-client-id"] = rocket.client_id
        settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
        by, newer = (rocket, other) if breaks == "its own" else (other, rocket)
        stream, _ = await by.connect(settings)
        newer_stream, _ = await newer.connect(settings)
        await sent(other, message_of("order", b"x"))
        [message] = await received(by, auto_renew=True)
        link.break_off()
        async with asyncio.timeout(WITHIN_S):
            while len(parts.connections) > 1:
                await asyncio.sleep(0.01)
        held = parts.renewals._held[handle_of(message)]
        before = held.until
        await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
        assert (held.until > before) == (breaks == "the other")
        stream.cancel()
        newer_stream.cancel()


async def test_an_answer_is_lost_with_its_connection_though_the_first_stream_there_ended_in_order(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], link: Link
) -> None:
    parts, channel = gateway
    settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{link.port}") as breaking:
        rocket = RocketClient(breaking)
        stream, _ = await rocket.connect(settings)
        await sent(rocket, message_of("order", b"x"))
        [message] = await received(rocket, auto_renew=True)
        await stream.done_writing()
        async with asyncio.timeout(WITHIN_S):
            assert await stream.code() == grpc.StatusCode.OK
        newer, _ = await rocket.connect(settings)
        link.break_off()
        await left(parts, rocket)
        newer.cancel()
    again = RocketClient(channel)
    again.client_id = again._metadata["x-mq-client-id"] = rocket.client_id
    stream, _ = await again.connect(settings)
    held = parts.renewals._held[handle_of(message)]
    before = held.until
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
    assert held.until == before
    stream.cancel()


async def test_a_connection_with_another_stream_is_not_broken_by_a_stream_that_its_client_cancels(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel],
) -> None:
    parts, channel = gateway
    rocket = RocketClient(channel)
    settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
    older, _ = await rocket.connect(settings)
    newer, _ = await rocket.connect(settings)
    older.cancel()
    async with asyncio.timeout(WITHIN_S):
        while len(parts.clients._open) > 1:
            await asyncio.sleep(0.01)
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket, auto_renew=True)
    held = parts.renewals._held[handle_of(message)]
    before = held.until
    await parts.renewals.renew(time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1)
    assert held.until > before
    newer.cancel()


@pytest.mark.parametrize("half_closed", [False, True])
async def test_a_stream_that_its_connection_ended_is_broken(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], link: Link, half_closed: bool
) -> None:
    """Also one that the client ended at the same time, and each time: gRPC says both ends of a stream at once."""
    parts, _ = gateway
    for _ in range(ROUNDS):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{link.port}") as lossy:
            rocket = RocketClient(lossy)
            stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
            client = parts.clients.get(rocket.client_id, ApiKeys(None, None))
            assert client is not None
            if half_closed:
                await stream.done_writing()
            link.break_off()
            async with asyncio.timeout(WITHIN_S):
                while client.connection.broke_at is None:
                    await asyncio.sleep(0.01)
            await left(parts, rocket)
            stream.cancel()
