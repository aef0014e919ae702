"""What one client may take of a gateway: connections, topics, and messages of its stream of settings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rocketmq.buffers import Buffers
from app.rocketmq.calls import ClientCall
from app.rocketmq.claiming import Claiming
from app.rocketmq.clients import ConnectedClients
from app.rocketmq.connection_limit import SPARE, ConnectionLimit
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.leaving import Leaving
from app.rocketmq.protocol.definition_pb2 import Code, Resource, Settings
from app.rocketmq.protocol.service_pb2 import QueryRouteRequest, QueryRouteResponse, TelemetryCommand
from app.rocketmq.refusals import CallRefused
from app.rocketmq.renewals import Renewals
from app.rocketmq.sessions import ClientSessions
from app.rocketmq.settings_stream import SettingsStream
from app.rocketmq.subscriptions import Subscriptions
from tests.support.gateway import (
    LIMITS,
    GatewayProcess,
    RocketClient,
    consumer_of,
    gateway_over,
    producer_of,
    receive_of,
)
from tests.support.raw_grpc import END_STREAM, WITHIN_S, message, raw_caller
from tests.support.remoting import RemotingPeer

NO_SERVICE = "http://127.0.0.1:9"
ROUTE = QueryRouteRequest(topic=Resource(name="order"))
ROUTE.endpoints.addresses.add(host="127.0.0.1", port=1)


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[RocketClient]:
    """A client with a connection of its own. Channels of a process share one otherwise."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield RocketClient(channel)


async def ended_with(stream: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(WITHIN_S):
        return await stream.code(), await stream.details()


async def until_gone(counted: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while len(counted):
            await asyncio.sleep(0.01)


async def test_calls_of_a_connection_above_the_limit_are_refused_until_another_ends(client: httpx.AsyncClient) -> None:
    async with gateway_over(client._transport, connections=1) as (gateway, _), client_of(gateway.port) as second:
        async with client_of(gateway.port) as first:
            stream, _ = await first.connect(producer_of("order"))
            # By each kind of call.
            answer = await second.call("QueryRoute", ROUTE)
            assert answer.status.code == Code.TOO_MANY_REQUESTS
            assert "--max-connections" in answer.status.message
            assert await second.receive(receive_of("points", "order")) == (Code.TOO_MANY_REQUESTS, [])
            code, details = await ended_with(second.telemetry())
            assert (code, "--max-connections" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            # A connection that has a call may have more.
            assert (await first.call("QueryRoute", ROUTE)).status.code == Code.OK
            stream.cancel()
        await until_gone(gateway.connections)
        assert (await second.call("QueryRoute", ROUTE)).status.code == Code.OK
    counted = gateway.metrics.exposition().decode()
    for method in ("QueryRoute", "ReceiveMessage", "Telemetry"):
        assert f'code="TOO_MANY_REQUESTS",method="{method}",protocol="grpc"}} 1.0' in counted


@pytest.mark.parametrize("method", ["SendMessage", "ReceiveMessage", "Telemetry"])
@pytest.mark.parametrize("content", [b"", b"\x00\x00\x00\x10\x00half"], ids=["nothing", "half a request"])
async def test_a_connection_that_disappears_within_a_call_is_not_counted(
    client: httpx.AsyncClient, method: str, content: bytes
) -> None:
    async with gateway_over(client._transport) as (gateway, _), raw_caller(gateway.port) as caller:
        caller.begin(1, method)
        caller.send(1, content)
        async with asyncio.timeout(WITHIN_S):
            while not len(gateway.connections):
                await asyncio.sleep(0.01)
        caller.disappear()
        await until_gone(gateway.connections)


async def test_a_client_that_disappears_without_reading_is_not_counted(client: httpx.AsyncClient) -> None:
    async with gateway_over(client._transport) as (gateway, _), raw_caller(gateway.port) as caller:
        assert await caller.greeted()
        caller.begin(1, "Telemetry")
        # The answers are larger than the window of a client that does not read.
        settings = producer_of(*(f"{'order' * 20}.{number}" for number in range(700)))
        for _ in range(5):
            for part in _parts(message(TelemetryCommand(settings=settings).SerializeToString())):
                caller.send(1, part)
        async with asyncio.timeout(WITHIN_S):
            while not len(gateway.clients):
                await asyncio.sleep(0.01)
        caller.disappear()
        await until_gone(gateway.clients)
        await until_gone(gateway.connections)


def _parts(content: bytes) -> list[bytes]:
    # The largest frame that a server takes without a word.
    return [content[at : at + 16_384] for at in range(0, len(content), 16_384)]


def test_a_connection_is_counted_while_it_has_a_call() -> None:
    limit = ConnectionLimit(2)
    with limit.call("a"), limit.call("a"), limit.call("b"):
        assert len(limit) == 2
        with pytest.raises(CallRefused), limit.call("c"):
            pass
        with limit.call("b"):
            pass
        assert len(limit) == 2
    assert len(limit) == 0
    with limit.call("c"):
        assert len(limit) == 1


async def test_settings_wait_for_a_client_that_does_not_read() -> None:
    read = []

    async def commands() -> AsyncIterator[TelemetryCommand]:
        for number in range(3):
            read.append(number)
            yield TelemetryCommand(settings=producer_of(f"order{number}"))

    api = HalfnoteApi(NO_SERVICE, True, GatewayMetrics(), Buffers(LIMITS.buffered_bytes))
    clients, subscriptions = ConnectedClients(), Subscriptions(api)
    leaving = Leaving(Claiming(api, subscriptions), Renewals(api, clients))
    sessions = ClientSessions(clients, subscriptions, leaving, LIMITS)
    answers = sessions.telemetry(commands(), ClientCall("c", ApiKeys(None, None), None))
    for number in range(3):
        answer = await anext(answers)
        assert answer.settings.publishing.topics[0].name == f"order{number}"
        for _ in range(100):
            await asyncio.sleep(0)
        assert read == list(range(number + 1))
    assert [one async for one in answers] == []
    await api.aclose()


async def test_a_stream_of_too_many_settings_is_ended(client: httpx.AsyncClient) -> None:
    async with gateway_over(client._transport, settings_per_minute=1) as (gateway, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(producer_of("order"))
        # One: gRPC's client calls a refusal during a further write an internal error.
        await stream.write(TelemetryCommand(settings=producer_of("order")))
        code, details = await ended_with(stream)
        assert (code, "--max-settings-per-minute" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
        await until_gone(gateway.clients)
        # The client is back with its next stream.
        stream, answer = await rocket.connect(producer_of("order"))
        assert answer.publishing.max_body_size == LIMITS.body_bytes
        stream.cancel()


async def test_a_stream_of_empty_messages_is_ended_and_other_calls_go_on(client: httpx.AsyncClient) -> None:
    async with gateway_over(client._transport, settings_per_minute=5) as (gateway, _), raw_caller(gateway.port) as one:
        one.begin(1, "Telemetry")
        one.send(1, message(b"") * 1000)
        assert await one.answer(1) == b""
        one.begin(3, "QueryRoute")
        one.send(3, message(ROUTE.SerializeToString()), END_STREAM)
        assert QueryRouteResponse.FromString(await one.answer(3)).status.code == Code.OK


@given(per_minute=st.integers(1, 1000), waits=st.lists(st.floats(0, 120), max_size=100))
def test_a_stream_has_so_many_messages_a_minute_and_as_many_at_once(per_minute: int, waits: list[float]) -> None:
    stream, at, taken = SettingsStream(replace(LIMITS, settings_per_minute=per_minute)), 1e6, list[float]()
    for wait in [0.0, *waits]:
        at += wait
        try:
            stream.take(b"", at)
        except CallRefused:
            break
        taken.append(at)
    for number, since in enumerate(taken):
        assert len(taken) - number <= per_minute * (1 + (taken[-1] - since) / 60) + 0.001


@pytest.mark.parametrize("per_minute", [1, 7, 60, 999])
def test_a_stream_may_have_the_messages_of_a_minute_at_once_and_then_one_at_a_time(per_minute: int) -> None:
    stream = SettingsStream(replace(LIMITS, settings_per_minute=per_minute))
    for _ in range(per_minute):
        stream.take(b"", 100.0)
    for number in range(1, 100):
        stream.take(b"", 100.0 + number * 60.001 / per_minute)
    with pytest.raises(CallRefused) as refused:
        stream.take(b"", 100.0 + 99 * 60.001 / per_minute)
    assert refused.value.code == Code.TOO_MANY_REQUESTS


@pytest.mark.parametrize("before", [0, 1], ids=["first", "later"])
async def test_settings_of_too_many_bytes_end_the_stream(client: httpx.AsyncClient, before: int) -> None:
    most = TelemetryCommand(settings=producer_of("order"))
    async with gateway_over(client._transport, settings_bytes=most.ByteSize()) as (gateway, channel):
        rocket = RocketClient(channel)
        stream = rocket.telemetry()
        for _ in range(before):
            await stream.write(most)
            assert (await stream.read()).status.code == Code.OK
        await stream.write(TelemetryCommand(settings=producer_of("orders")))
        code, details = await ended_with(stream)
        assert (code, "--max-settings-bytes" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await until_gone(gateway.clients)


@pytest.mark.parametrize("consumer", [False, True], ids=["producer", "consumer"])
async def test_settings_that_name_too_many_topics_end_the_stream(client: httpx.AsyncClient, consumer: bool) -> None:
    async with gateway_over(client._transport, topics=2) as (gateway, channel):
        stream, answer = await RocketClient(channel).connect(_naming("a", "b", consumer=consumer))
        assert answer.HasField("subscription" if consumer else "publishing")
        await stream.write(TelemetryCommand(settings=_naming("c", "d", "e", consumer=consumer)))
        code, details = await ended_with(stream)
        assert (code, "--max-topics" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await until_gone(gateway.clients)
    made = [one["name"] for one in (await client.get("/subscriptions")).json()["items"]]
    assert made == (["points@a", "points@b"] if consumer else [])


def _naming(*topics: str, consumer: bool) -> Settings:
    if not consumer:
        return producer_of(*topics)
    settings = consumer_of("points", topics[0])
    for topic in topics[1:]:
        settings.subscription.subscriptions.extend(consumer_of("points", topic).subscription.subscriptions)
    return settings


async def test_connections_of_both_ports_are_limited_by_an_option(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, NO_SERVICE, "--max-connections", "1", "--remoting-port", "0")
    await gateway.start()
    try:
        async with client_of(gateway.port) as first, client_of(gateway.port) as second:
            stream, _ = await first.connect(producer_of("order"))
            assert (await second.call("QueryRoute", ROUTE)).status.code == Code.TOO_MANY_REQUESTS
            stream.cancel()
        peer = await RemotingPeer.connect(gateway.remoting_port)
        assert (await peer.heartbeat(producers=("shop",))).code == 0
        refused = await RemotingPeer.connect(gateway.remoting_port)
        await refused.ended()
        await refused.close()
        await peer.close()
    finally:
        assert gateway.stop() == 0


async def test_far_more_connections_are_ended_when_they_connect(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, NO_SERVICE, "--max-connections", "1")
    await gateway.start()
    try:
        async with AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(raw_caller(gateway.port)) for _ in range(1 + SPARE)]
            for caller in callers:
                await caller.greeted()
            async with raw_caller(gateway.port) as beyond:
                assert not await beyond.greeted()
            callers[0].disappear()
            async with asyncio.timeout(WITHIN_S):
                while True:
                    async with raw_caller(gateway.port) as next_one:
                        if await next_one.greeted():
                            break
    finally:
        assert gateway.stop() == 0


async def test_topics_and_settings_are_limited_by_options(tmp_path: Path) -> None:
    limits = ("--max-topics", "1", "--max-settings-bytes", "100", "--max-settings-per-minute", "1")
    gateway = GatewayProcess(tmp_path, NO_SERVICE, *limits)
    await gateway.start()
    try:
        async with client_of(gateway.port) as rocket:
            named = []
            for settings in (producer_of("a", "b"), producer_of("a" * 100)):
                stream = rocket.telemetry()
                await stream.write(TelemetryCommand(settings=settings))
                named.append((await ended_with(stream))[1])
            stream, _ = await rocket.connect(producer_of("order"))
            await stream.write(TelemetryCommand(settings=producer_of("order")))
            named.append((await ended_with(stream))[1])
            for option, details in zip(limits[::2], named, strict=True):
                assert option in details
    finally:
        assert gateway.stop() == 0
