"""Requests over gRPC whose bytes trickle in, by raw frames of HTTP/2."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from app.rocketmq.protocol.definition_pb2 import Code, Resource
from app.rocketmq.protocol.service_pb2 import (
    QueryRouteRequest,
    QueryRouteResponse,
    ReceiveMessageResponse,
    SendMessageResponse,
)
from tests.support.gateway import gateway_over
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
