"""Connections that break without a word: no packet of them arrives any more, and nothing ends them."""

import asyncio
import re
import time
from pathlib import Path

import grpc.aio
import httpx
import pytest

from app.rocketmq import renewals, server
from app.rocketmq.credentials import ApiKeys
from tests.support.faulty_proxy import FaultyProxy
from tests.support.gateway import GatewayProcess, RocketClient, gateway_over, producer_of

# Beside the time of the ping and of its answer.
MARGIN_S = 8.0


def test_the_ping_ends_before_an_answer_counts_as_arrived() -> None:
    assert (server.PING_AFTER_MS + server.PING_ANSWERED_MS) / 1000 + MARGIN_S < renewals.BREAK_NOTICED_S


@pytest.mark.slow
@pytest.mark.parametrize(("after_s", "answered_s"), [(1.0, 1.0), (1.0, 5.0), (5.0, 1.0)])
async def test_a_silent_connection_is_noticed_by_its_ping(
    after_s: float, answered_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "PING_AFTER_MS", round(after_s * 1000))
    monkeypatch.setattr(server, "PING_ANSWERED_MS", round(answered_s * 1000))
    async with (
        gateway_over(None) as (parts, _),
        FaultyProxy(parts.port) as proxy,
        grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
    ):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(producer_of("order"))
        client = parts.clients.get(rocket.client_id, ApiKeys(None, None))
        assert client is not None
        # Pings that are answered keep it.
        await asyncio.sleep(after_s + answered_s + 1)
        assert client.connection.broke_at is None
        proxy.hold()
        begun = time.monotonic()
        async with asyncio.timeout(after_s + answered_s + MARGIN_S):
            while client.connection.broke_at is None:
                await asyncio.sleep(0.01)
        # The last ping that was answered may have come just before.
        assert client.connection.broke_at - begun > answered_s - 0.5
        assert parts.clients.get(rocket.client_id, ApiKeys(None, None)) is None
        stream.cancel()


@pytest.mark.slow
async def test_a_gateway_as_it_is_shipped_notices_a_silent_connection(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9", "--operations-port", "0")
    await gateway.start()
    try:
        async with (
            FaultyProxy(gateway.port) as proxy,
            grpc.aio.insecure_channel(f"127.0.0.1:{proxy.port}") as channel,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.operations_port}", trust_env=False) as operator,
        ):
            stream, _ = await RocketClient(channel).connect(producer_of("order"))
            proxy.hold()
            begun = time.monotonic()
            assert await clients_of(operator) == 1
            async with asyncio.timeout(80 + MARGIN_S):
                while await clients_of(operator) == 1:
                    await asyncio.sleep(0.1)
            assert time.monotonic() - begun > 80 - 1
            stream.cancel()
    finally:
        gateway.stop()


async def clients_of(operator: httpx.AsyncClient) -> float:
    """Return how many clients are connected over gRPC."""
    found = re.search(r'halfnote_rocketmq_clients\{protocol="grpc"\} (\S+)', (await operator.get("/metrics")).text)
    assert found is not None
    return float(found[1])
