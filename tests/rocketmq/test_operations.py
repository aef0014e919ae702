"""Probes and metrics of a gateway."""

import asyncio
import contextlib
import json
import re
import socket
from pathlib import Path
from uuid import UUID

import grpc.aio
import httpx
import pytest

from app.rocketmq import operations_server
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.operations_server import OperationsServer
from app.rocketmq.protocol.definition_pb2 import COMMIT, SOURCE_SERVER_CHECK, TRANSACTION, Resource
from app.rocketmq.protocol.service_pb2 import EndTransactionRequest, SendMessageRequest
from app.rocketmq.remoting.codes import RequestCode
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_now
from tests.support.gateway import (
    GatewayProcess,
    RocketClient,
    codes_of,
    consumer_of,
    gateway_over,
    message_of,
    producer_of,
    receive_of,
)
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.remoting import RemotingPeer, remoting_over


def samples(text: str) -> dict[str, float]:
    """Return the values of an exposition by series, without those of histograms' buckets."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines if "_bucket{" not in series}


async def test_the_process_has_probes_and_metrics_on_a_port_of_their_own(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    gateway = GatewayProcess(tmp_path, url, "--remoting-port", "0", "--operations-port", "0")
    await gateway.start()
    try:
        base = f"http://127.0.0.1:{gateway.operations_port}"
        async with (
            httpx.AsyncClient(base_url=base, trust_env=False) as operator,
            grpc.aio.insecure_channel(gateway.endpoint) as channel,
        ):
            # Its service is away. It is ready none the less: clients read a status, and reconnecting would not help.
            assert [(await operator.get(f"/{name}")).status_code for name in ("livez", "readyz", "x")] == [
                200,
                200,
                404,
            ]
            request = SendMessageRequest(messages=[message_of("order", b"x")])
            assert codes_of([await RocketClient(channel).call("SendMessage", request)]) == ["PROXY_TIMEOUT"]
            peer = await RemotingPeer.connect(gateway.remoting_port)
            await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})
            await peer.call(9999)
            answer = await operator.get("/metrics")
            await peer.close()
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = samples(answer.text)
        assert found['halfnote_rocketmq_requests_total{code="PROXY_TIMEOUT",method="SendMessage",protocol="grpc"}'] == 1
        assert found['halfnote_rocketmq_request_seconds_count{method="SendMessage",protocol="grpc"}'] == 1
        route, other = ("GET_ROUTE", "SUCCESS"), ("OTHER", "REQUEST_CODE_NOT_SUPPORTED")
        for method, code in (route, other):
            series = f'halfnote_rocketmq_requests_total{{code="{code}",method="{method}",protocol="remoting"}}'
            assert found[series] == 1
        assert found['halfnote_rocketmq_clients{protocol="remoting"}'] == 1
        assert found['halfnote_rocketmq_api_requests_total{status="none"}'] >= 1
    finally:
        assert gateway.stop() == 0


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
async def test_every_port_of_all_addresses_takes_both_kinds(tmp_path: Path) -> None:
    gateway = GatewayProcess(
        tmp_path, "http://127.0.0.1:9", "--host", "::", "--remoting-port", "0", "--operations-port", "0"
    )
    await gateway.start()
    try:
        async with httpx.AsyncClient(trust_env=False) as operator:
            for host in ("127.0.0.1", "[::1]"):
                assert (await operator.get(f"http://{host}:{gateway.operations_port}/readyz")).status_code == 200
        for host, port in (("127.0.0.1", gateway.port), ("::1", gateway.port), ("::1", gateway.remoting_port)):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
        peer = await RemotingPeer.connect(gateway.remoting_port)
        route = json.loads((await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).body)
        # A client of IPv4 gets an address of IPv4.
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": f"127.0.0.1:{gateway.remoting_port}"}
        await peer.close()
    finally:
        assert gateway.stop() == 0


async def test_checks_that_are_out_are_counted_until_their_answer(client: httpx.AsyncClient, runtime: Runtime) -> None:
    group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
    assert (await client.put("/producer-groups/order", json=group)).status_code == 201
    async with gateway_over(client._transport) as (gateway, channel):
        rocket = RocketClient(channel)
        message = message_of("order", b"order 1030", message_type=TRANSACTION)
        sent = await rocket.call("SendMessage", SendMessageRequest(messages=[message]))
        async with runtime.database.connection() as connection:
            assert await ask_now(connection, UUID(sent.entries[0].transaction_id), runtime.clock.now())
        stream, _ = await rocket.connect(producer_of("order"))
        async with asyncio.timeout(60):
            command = await stream.read()
        found = samples(gateway.metrics.exposition().decode())
        assert found['halfnote_rocketmq_checks_out{protocol="grpc"}'] == 1
        assert found['halfnote_rocketmq_clients{protocol="grpc"}'] == 1
        request = EndTransactionRequest(
            topic=Resource(name="order"),
            transaction_id=command.recover_orphaned_transaction_command.transaction_id,
            resolution=COMMIT,
            source=SOURCE_SERVER_CHECK,
        )
        assert codes_of([await rocket.call("EndTransaction", request)]) == ["OK"]
        found = samples(gateway.metrics.exposition().decode())
        assert found['halfnote_rocketmq_checks_out{protocol="grpc"}'] == 0
        assert found['halfnote_rocketmq_checks_total{outcome="sent",protocol="grpc"}'] == 1
        assert found['halfnote_rocketmq_check_seconds_count{protocol="grpc"}'] == 1
        # A push consumer's message is held until it is settled.
        consuming, _ = await rocket.connect(consumer_of("points", "order"))
        await rocket.receive(receive_of("points", "order"))
        await rocket.call("SendMessage", SendMessageRequest(messages=[message_of("order", b"x")]))
        await rocket.receive(receive_of("points", "order", auto_renew=True))
        found = samples(gateway.metrics.exposition().decode())
        assert found['halfnote_rocketmq_messages_held{protocol="grpc"}'] == 1
        assert found['halfnote_rocketmq_requests_total{code="OK",method="ReceiveMessage",protocol="grpc"}'] == 1
        assert 'halfnote_rocketmq_request_seconds_count{method="ReceiveMessage",protocol="grpc"}' not in found
        # Also while it is away, until the time of the message is over.
        for one in (consuming, stream):
            one.cancel()
        async with asyncio.timeout(30):
            while found['halfnote_rocketmq_clients{protocol="grpc"}'] != 0:
                await asyncio.sleep(0.01)
                found = samples(gateway.metrics.exposition().decode())
        assert found['halfnote_rocketmq_messages_held{protocol="grpc"}'] == 1
        [held] = gateway.renewals._held.values()
        await gateway.renewals.renew(held.until + 1)
        found = samples(gateway.metrics.exposition().decode())
        assert found['halfnote_rocketmq_messages_held{protocol="grpc"}'] == 0
        described = gateway.metrics.exposition().decode()
        assert "Messages out to push consumers now, which are renewed while these are connected" in described
        stream.cancel()


async def test_remoting_connections_that_the_gateway_ends_are_counted(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport) as (gateway, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
            writer.close()
            await writer.wait_closed()
        found = samples(gateway.metrics.exposition().decode())
        assert found['halfnote_rocketmq_connections_refused_total{cause="frame"}'] == 1


@pytest.mark.parametrize("content", [b"", b"GET /livez HTTP/1.1\r\n", b"x" * 9000], ids=["nothing", "half", "long"])
async def test_a_slow_or_long_request_ends_its_connection(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_server, "HEAD_S", 0.2)
    server = OperationsServer(GatewayMetrics())
    port = await server.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    monkeypatch.undo()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as operator:
        assert (await operator.get("/livez")).text == "ok\n"
        assert (await operator.get("/readyz")).status_code == 503
        assert (await operator.post("/livez")).status_code == 405
    await server.stop()


def test_each_metric_is_on_its_page() -> None:
    families = re.findall(r"^# TYPE (halfnote_rocketmq_\w+)", GatewayMetrics().exposition().decode(), re.MULTILINE)
    assert len(families) == 11
    page = (ROOT / "docs" / "rocketmq-clients.md").read_text()
    assert [name for name in families if f"`{name}`" not in page] == []
