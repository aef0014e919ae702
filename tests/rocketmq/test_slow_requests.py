"""Requests over gRPC whose bytes trickle in, by raw frames of HTTP/2."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from structlog.testing import capture_logs

from app.rocketmq.protocol.definition_pb2 import Code, Resource
from app.rocketmq.protocol.service_pb2 import (
    QueryRouteRequest,
    QueryRouteResponse,
    ReceiveMessageResponse,
    SendMessageResponse,
    TelemetryCommand,
)
from app.rocketmq.refusals import CallRefused
from app.rocketmq.service import SERVICE, MessagingService, RequestContext
from tests.support.gateway import RocketClient, gateway_over, producer_of
from tests.support.raw_grpc import END_STREAM, WITHIN_S, RawCaller, message, raw_caller

ARRIVES_S = 0.3


@asynccontextmanager
async def trickling(caller: RawCaller, stream: int) -> AsyncIterator[None]:
    task = asyncio.create_task(caller.trickle(stream))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("method", "answer_type"), [("SendMessage", SendMessageResponse), ("ReceiveMessage", ReceiveMessageResponse)]
)
async def test_a_request_that_trickles_in_is_refused(
    client: httpx.AsyncClient, method: str, answer_type: type[SendMessageResponse] | type[ReceiveMessageResponse]
) -> None:
    async with (
        gateway_over(client._transport, arrives_s=ARRIVES_S) as (gateway, _),
        raw_caller(gateway.port) as caller,
    ):
        caller.begin(1, method)
        async with trickling(caller, 1):
            answer = answer_type.FromString(await caller.answer(1))
        assert answer.status.code == Code.REQUEST_TIMEOUT
        assert "--request-timeout-s" in answer.status.message
        # Other calls of the connection go on.
        request = QueryRouteRequest(topic=Resource(name="order"))
        request.endpoints.addresses.add(host="127.0.0.1", port=1)
        caller.begin(3, "QueryRoute")
        caller.send(3, message(request.SerializeToString()), END_STREAM)
        assert QueryRouteResponse.FromString(await caller.answer(3)).status.code == Code.OK


async def test_a_stream_without_settings_ends(client: httpx.AsyncClient) -> None:
    async with (
        gateway_over(client._transport, arrives_s=ARRIVES_S) as (gateway, _),
        raw_caller(gateway.port) as caller,
    ):
        caller.begin(1, "Telemetry")
        async with trickling(caller, 1):
            assert await caller.answer(1) == b""
        assert len(gateway.clients) == 0


async def test_a_call_whose_request_never_comes_is_refused(client: httpx.AsyncClient) -> None:
    async with (
        gateway_over(client._transport, arrives_s=WITHIN_S) as (gateway, _),
        raw_caller(gateway.port) as caller,
    ):
        caller.begin(1, "SendMessage")
        caller.send(1, b"", END_STREAM)
        assert SendMessageResponse.FromString(await caller.answer(1)).status.code == Code.BAD_REQUEST


async def test_a_call_that_reads_its_request_after_the_gateway_has_stopped_is_no_failure(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, stopped, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    arrived = MessagingService._arrived
    refusals: list[CallRefused] = []

    async def late(service: MessagingService, context: RequestContext) -> bytes:
        begun.set()
        while not stopped.is_set():
            # The server cancels its calls when it stops; this one goes on.
            with contextlib.suppress(asyncio.CancelledError):
                await stopped.wait()
        try:
            return await arrived(service, context)
        except CallRefused as refused:
            refusals.append(refused)
            raise
        finally:
            ended.set()

    monkeypatch.setattr(MessagingService, "_arrived", late)
    with capture_logs() as lines:
        async with gateway_over(client._transport, arrives_s=WITHIN_S) as (gateway, channel):
            call = channel.stream_unary(f"/{SERVICE}/SendMessage")(metadata=RocketClient(channel).metadata)
            await asyncio.wait_for(begun.wait(), WITHIN_S)
            await gateway.stop()
            stopped.set()
            await asyncio.wait_for(ended.wait(), WITHIN_S)
            call.cancel()
    assert [refused.code for refused in refusals] == [Code.INTERNAL_SERVER_ERROR]
    assert [line for line in lines if line["event"] == "rocketmq_call_failed"] == []


class OneSettings:
    """A call by a stream whose client sends settings once, and is then read from without an answer."""

    def __init__(self) -> None:
        self.reads = 0
        self.canceled = False
        self.ended = asyncio.Event()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-mq-client-id", "one"),)

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return None

    async def read(self) -> object:
        self.reads += 1
        if self.reads == 1:
            return TelemetryCommand(settings=producer_of("order")).SerializeToString()
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.canceled = True
            raise
        return grpc.aio.EOF

    async def requests(self) -> AsyncIterator[bytes]:
        """The requests as gRPC gives them to a handler."""
        while isinstance(content := await self.read(), bytes):
            yield content

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AssertionError(details)


async def test_a_read_goes_on_after_the_gateway_has_ended_its_stream(client: httpx.AsyncClient) -> None:
    """gRPC writes to the memory of the read when the call ends."""
    context = OneSettings()
    async with gateway_over(client._transport) as (gateway, _):
        handler: Any = gateway.service.handler().service(Telemetry())
        stream = handler.stream_stream(context.requests(), context)
        answer = await anext(stream)
        assert answer.settings.publishing.topics[0].name == "order"
        going_on = asyncio.ensure_future(anext(stream, None))
        async with asyncio.timeout(WITHIN_S):
            while context.reads < 2:
                await asyncio.sleep(0.01)
        gateway.clients.close()
        assert await going_on is None
        await asyncio.sleep(0)
        assert not context.canceled
        context.ended.set()


class Telemetry(grpc.HandlerCallDetails):
    """The method of streams of settings."""

    method = f"/{SERVICE}/Telemetry"
    invocation_metadata = ()
