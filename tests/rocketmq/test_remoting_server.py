"""Malformed and slow connections of remoting clients, limits, and a gateway without its service."""

import asyncio
import contextlib
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.rocketmq.credentials import ApiKeys
from app.rocketmq.remoting import connections
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame, encode
from tests.support.certificates import Authority
from tests.support.cli_runs import Run, run_alone
from tests.support.gateway import BODY_LIMIT, GatewayProcess
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.remoting import ONEWAY, RemotingPeer, remoting_over

__all__ = ["run_alone"]

ROUTE = encode(RemotingFrame(RequestCode.GET_ROUTE, 1, fields={"topic": "order"}))


@pytest.fixture
async def port(client: httpx.AsyncClient) -> AsyncIterator[int]:
    async with remoting_over(client._transport) as (_, port):
        yield port


async def serves(port: int) -> None:
    peer = await RemotingPeer.connect(port)
    assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
    await peer.close()


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        (0).to_bytes(4, "big"),
        (3).to_bytes(4, "big") + b"abc",
        (BODY_LIMIT + 3 * 1024 * 1024).to_bytes(4, "big"),
        (2**32 - 1).to_bytes(4, "big"),
        (8).to_bytes(4, "big") + (9).to_bytes(4, "big") + b"abcd",
        (8).to_bytes(4, "big") + (4).to_bytes(4, "big") + b"abcd",
        (6).to_bytes(4, "big") + (2).to_bytes(4, "big") + b"{}",
        (6).to_bytes(4, "big") + (2).to_bytes(4, "big") + b"[]",
        (8).to_bytes(4, "big") + (7 << 24 | 4).to_bytes(4, "big") + b"abcd",
        (8).to_bytes(4, "big") + (1 << 24 | 4).to_bytes(4, "big") + b"abcd",
        (100_004).to_bytes(4, "big") + (100_000).to_bytes(4, "big") + b'{"code":' + b"[" * 99_992,
    ],
)
async def test_bytes_that_are_no_frame_end_the_connection(port: int, content: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(content)
    async with asyncio.timeout(30):
        # Closed with what was not read, the connection is reset.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    await serves(port)


@pytest.mark.parametrize("content", [b"", b"\x00\x00", ROUTE[:-1]], ids=["nothing", "half a length", "half a frame"])
async def test_a_slow_frame_ends_the_connection(client: httpx.AsyncClient, content: bytes) -> None:
    async with remoting_over(client._transport, arrives_s=0.2) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()


async def test_an_idle_connection_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", 0.2)
    peer = await RemotingPeer.connect(port)
    assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
    await peer.ended()
    await peer.close()


async def test_connections_are_limited(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, connections=1) as (_, port):
        peer = await RemotingPeer.connect(port)
        assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
        refused = await RemotingPeer.connect(port)
        await refused.ended()
        await refused.close()
        assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
        await peer.close()


@pytest.fixture
def certified(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a gateway with TLS has, and a client of it."""
    authority = Authority(tmp_path / "ca")
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(*authority.issue("127.0.0.1").write(tmp_path / "tls"))
    return own, ssl.create_default_context(cafile=authority.file)


async def test_requests_over_tls_are_answered(
    client: httpx.AsyncClient, certified: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async with remoting_over(client._transport, tls=certified[0]) as (_, port):
        peer = await RemotingPeer.connect(port, tls=certified[1])
        assert (await peer.heartbeat(producers=("shop",))).code == ResultCode.SUCCESS
        # More than fits into one record, in both directions.
        body = bytes(range(256)) * 4000
        assert (await peer.send(body)).code == ResultCode.SUCCESS
        plain, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ROUTE)
        with contextlib.suppress(ConnectionResetError):
            # An alert of TLS, and the end.
            await plain.read()
        writer.close()
        assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
        await peer.close()


@pytest.mark.parametrize("content", [b"", b"\x16\x03\x01\x02"], ids=["nothing", "half a record"])
async def test_a_slow_handshake_ends_the_connection(
    client: httpx.AsyncClient, certified: tuple[ssl.SSLContext, ssl.SSLContext], content: bytes
) -> None:
    async with remoting_over(client._transport, tls=certified[0], arrives_s=0.2) as (gateway, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(content)
        # Sooner than asyncio ends it, which is after a minute.
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        assert 'connections_refused_total{cause="slow"} 1.0' in gateway.metrics.exposition().decode()


async def test_connections_within_their_handshake_count(
    client: httpx.AsyncClient, certified: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async with remoting_over(client._transport, tls=certified[0], connections=1) as (gateway, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(30):
            while len(gateway._server) != 1:
                await asyncio.sleep(0.01)
            beyond, refused = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionResetError):
                assert await beyond.read() == b""
            refused.close()
            writer.close()
            while len(gateway._server):
                await asyncio.sleep(0.01)
        peer = await RemotingPeer.connect(port, tls=certified[1])
        assert (await peer.heartbeat(producers=("shop",))).code == ResultCode.SUCCESS
        # A gateway that stops ends a handshake too.
        await peer.close()
        async with asyncio.timeout(30):
            while len(gateway._server):
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while len(gateway._server) != 1:
                await asyncio.sleep(0.01)
            await gateway.stop()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()


async def test_what_a_client_names_is_limited(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, topics=2) as (_, port):
        peer = await RemotingPeer.connect(port)
        # A consumer names the topic of its retries too, for which the gateway does nothing.
        named = [{"topic": topic, "subString": "*", "expressionType": "TAG"} for topic in ("order", "%RETRY%points")]
        points = await peer.heartbeat(producers=("shop",), consumers={"points": "*"}, subscriptionDataSet=named)
        assert points.code == ResultCode.SUCCESS
        refused = await peer.heartbeat(producers=("shop",), consumers={"points": "*", "mail": "*"})
        assert refused.code == ResultCode.SYSTEM_ERROR
        assert "--max-topics" in (refused.remark or "")
        # What it had stays.
        assert (await peer.heartbeat(producers=("shop",), consumers={"points": "*"})).code == ResultCode.SUCCESS
        await peer.close()
    assert [one["name"] for one in (await client.get("/subscriptions")).json()["items"]] == ["points@order"]


async def test_groups_without_topics_and_topics_of_retries_are_limited(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, topics=2) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        groups = {f"points{number}": "*" for number in range(3)}
        refused = await peer.heartbeat(consumers=groups, subscriptionDataSet=[])
        assert (refused.code, "--max-topics" in (refused.remark or "")) == (ResultCode.SYSTEM_ERROR, True)
        # A refused client is not known.
        assert gateway.clients.get(peer.client_id, ApiKeys(None, None)) is None
        # Groups of earlier heartbeats do not count: each one names all that its client has.
        for group in ("points", "third", "mail"):
            assert (await peer.heartbeat(consumers={group: "*"}, subscriptionDataSet=[])).code == ResultCode.SUCCESS
        # The topic of its own retries is free, those of other groups are not.
        retries = [
            {"topic": f"%RETRY%{group}", "subString": "*", "expressionType": "TAG"} for group in ("mail", "a", "b", "c")
        ]
        refused = await peer.heartbeat(consumers={"mail": "*"}, subscriptionDataSet=retries)
        assert refused.code == ResultCode.SYSTEM_ERROR
        own = await peer.heartbeat(consumers={"mail": "*"}, subscriptionDataSet=retries[:1])
        assert own.code == ResultCode.SUCCESS
        await peer.close()


async def test_lists_have_room_for_what_a_client_may_name(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, topics=2) as (_, port):
        peer = await RemotingPeer.connect(port)
        topics = ("order", "billing", "%RETRY%points")
        named = [{"topic": topic, "subString": "*", "expressionType": "TAG"} for topic in topics]
        answer = await peer.heartbeat(consumers={"points": "*"}, subscriptionDataSet=named)
        assert answer.code == ResultCode.SUCCESS, answer.remark
        queues = [
            {"topic": topic, "brokerName": "halfnote", "queueId": number} for topic in topics for number in range(4)
        ]
        for asked, code in ((queues, ResultCode.SUCCESS), ([*queues, queues[0]], ResultCode.SYSTEM_ERROR)):
            body = {"consumerGroup": "points", "clientId": peer.client_id, "mqSet": asked}
            answer = await peer.call(RequestCode.LOCK_BATCH_MQ, body=json.dumps(body).encode())
            assert (answer.code, "--max-topics" in (answer.remark or "")) == (code, code != ResultCode.SUCCESS)
        producers = ("shop", "mail", "CLIENT_INNER_PRODUCER")
        assert (await peer.heartbeat(producers=producers)).code == ResultCode.SUCCESS
        refused = await peer.heartbeat(producers=(*producers, "more"))
        assert (refused.code, "--max-topics" in (refused.remark or "")) == (ResultCode.SYSTEM_ERROR, True)
        await peer.close()


async def test_a_pull_says_why_the_last_heartbeat_was_refused(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, topics=1) as (_, port):
        peer = await RemotingPeer.connect(port)
        early = await peer.pull(0)
        assert (early.code, "the next one is enough" in str(early.remark)) == (ResultCode.SUBSCRIPTION_NOT_EXIST, True)
        refused = await peer.heartbeat(consumers={"points": "*", "mail": "*"})
        assert refused.code == ResultCode.SYSTEM_ERROR
        answer = await peer.pull(0)
        assert (answer.code, str(refused.remark) in str(answer.remark)) == (ResultCode.SUBSCRIPTION_NOT_EXIST, True)
        assert (await peer.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
        answer = await peer.pull(0, group="mail")
        assert "heartbeat" not in str(answer.remark)
        # A client that is known and wants too much as well.
        assert (await peer.heartbeat(consumers={"points": "*", "mail": "*"})).code == ResultCode.SYSTEM_ERROR
        answer = await peer.pull(0, group="mail")
        assert (answer.code, str(refused.remark) in str(answer.remark)) == (ResultCode.SUBSCRIPTION_NOT_EXIST, True)
        assert (await peer.pull(0)).code == ResultCode.PULL_NOT_FOUND
        await peer.close()


async def test_a_connection_has_one_client(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        first = peer.client_id
        assert (await peer.heartbeat(producers=("shop",))).code == ResultCode.SUCCESS
        peer.client_id = f"{first}-2"
        refused = await peer.heartbeat(producers=("mail",))
        assert (refused.code, first in (refused.remark or "")) == (ResultCode.SYSTEM_ERROR, True)
        assert gateway.clients.published() == {("shop", ApiKeys(None, None))}
        # The client of the connection goes on.
        peer.client_id = first
        assert (await peer.heartbeat(producers=("shop", "mail"))).code == ResultCode.SUCCESS
        assert {group for group, _ in gateway.clients.published()} == {"shop", "mail"}
        await peer.close()


async def test_what_a_client_named_before_is_forgotten(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, topics=2) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        for number in range(5):
            topic = f"order{number}"
            assert (await peer.heartbeat(consumers={"points": "*"}, topic=topic)).code == ResultCode.SUCCESS
            assert (await peer.pull(0, topic=topic)).code == ResultCode.PULL_NOT_FOUND
            properties = {"TRAN_MSG": "true"}
            await peer.send(b"x", group=f"shop{number}", topic=topic, properties=properties, f=4)
        known = gateway.clients.get(peer.client_id, ApiKeys(None, None))
        assert known is not None
        assert [topic for _, topic, _ in known._queues] == ["order4"]
        # It has no producer of these groups.
        assert known.sends_transactions == set()
        await peer.close()


async def test_groups_that_sent_transactions_are_forgotten_with_their_producers(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        for group in ("shop0", "shop1", "shop2"):
            assert (await peer.heartbeat(producers=(group,))).code == ResultCode.SUCCESS
            half = await peer.send(b"x", group=group, properties={"TRAN_MSG": "true"}, f=4)
            assert half.code == ResultCode.SUCCESS
        known = gateway.clients.get(peer.client_id, ApiKeys(None, None))
        assert known is not None
        assert known.sends_transactions == {"shop2"}
        left = {"clientID": peer.client_id, "producerGroup": "shop2"}
        assert (await peer.call(RequestCode.UNREGISTER_CLIENT, left)).code == ResultCode.SUCCESS
        assert known.sends_transactions == set()
        await peer.close()


async def test_many_requests_of_one_connection_are_answered(port: int) -> None:
    peer = await RemotingPeer.connect(port)
    answers = await asyncio.gather(*(peer.call(RequestCode.GET_ROUTE, {"topic": f"t{n}"}) for n in range(1000)))
    assert {one.code for one in answers} == {ResultCode.SUCCESS}
    await peer.close()


WAITS, LONG_MS = 2, 20_000


async def test_pulls_that_wait_hold_up_no_other_request(port: int) -> None:
    peer = await RemotingPeer.connect(port)
    assert (await peer.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
    pull = {
        "consumerGroup": "points",
        "queueId": 0,
        "queueOffset": 0,
        "sysFlag": WAITS,
        "suspendTimeoutMillis": LONG_MS,
    }
    for topic in ("order", "%RETRY%points"):
        for _ in range(connections.REQUESTS_MAX):
            peer.write(RequestCode.PULL_MESSAGE, {**pull, "topic": topic})
    async with asyncio.timeout(LONG_MS / 1000 / 2):
        answer = await peer.heartbeat(consumers={"points": "*"})
        assert answer.code == ResultCode.SUCCESS
        commit = {"consumerGroup": "points", "topic": "order", "queueId": 0, "commitOffset": 0}
        assert (await peer.call(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == ResultCode.SUCCESS
        assert (await peer.send(b"x")).code == ResultCode.SUCCESS
    await peer.close()


async def test_pulls_of_a_connection_are_limited(client: httpx.AsyncClient) -> None:
    async with remoting_over(client._transport, topics=2) as (_, port):
        peer = await RemotingPeer.connect(port)
        pull = {"queueId": 0, "queueOffset": 0, "sysFlag": WAITS, "suspendTimeoutMillis": LONG_MS}
        pull |= {"consumerGroup": "points", "topic": "%RETRY%points"}
        assert (await peer.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
        for _ in range(2 * connections.PULLS_PER_TOPIC):
            peer.write(RequestCode.PULL_MESSAGE, pull)
        async with asyncio.timeout(LONG_MS / 1000 / 2):
            refused = await peer.call(RequestCode.PULL_MESSAGE, pull)
        # No "not found": the client would pull again at once.
        assert (refused.code, "--max-topics" in (refused.remark or "")) == (ResultCode.SYSTEM_BUSY, True)
        assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == ResultCode.SUCCESS
        # Another connection has its own.
        other = await RemotingPeer.connect(port)
        assert (await other.heartbeat(consumers={"mail": "*"})).code == ResultCode.SUCCESS
        assert (await other.call(RequestCode.PULL_MESSAGE, {**pull, "sysFlag": 0})).code == ResultCode.PULL_NOT_FOUND
        await peer.close()
        await other.close()


@pytest.mark.parametrize(("more", "body"), [({}, b"x"), ({"subscription": "x" * 20_000}, b"")], ids=["body", "fields"])
async def test_a_pull_that_would_take_much_memory_is_refused_at_once(
    port: int, more: dict[str, str], body: bytes
) -> None:
    peer = await RemotingPeer.connect(port)
    assert (await peer.heartbeat(consumers={"points": "*"})).code == ResultCode.SUCCESS
    pull = {"queueId": 0, "queueOffset": 0, "sysFlag": WAITS, "suspendTimeoutMillis": LONG_MS}
    pull |= {"consumerGroup": "points", "topic": "%RETRY%points", **more}
    async with asyncio.timeout(LONG_MS / 1000 / 2):
        # The gateway would keep it for as long as it waits.
        refused = await peer.call(RequestCode.PULL_MESSAGE, pull, body)
    assert (refused.code, "body" in (refused.remark or "")) == (ResultCode.SYSTEM_ERROR, True)
    await peer.close()


@pytest.mark.parametrize("body", [b"x", b""], ids=["with a body", "too many"])
async def test_a_refused_pull_takes_no_answer_if_it_wants_none(client: httpx.AsyncClient, body: bytes) -> None:
    async with remoting_over(client._transport, topics=0) as (_, port):
        peer = await RemotingPeer.connect(port)
        pull = {"consumerGroup": "points", "topic": "order", "queueId": 0, "queueOffset": 0}
        refused: asyncio.Future[RemotingFrame] = asyncio.get_running_loop().create_future()
        peer._answers[peer.write(RequestCode.PULL_MESSAGE, pull, body, flag=ONEWAY)] = refused
        # Answers of a connection come in the order in which they are sent.
        assert (await peer.call(RequestCode.PULL_MESSAGE, pull, body)).code != ResultCode.SUCCESS
        assert not refused.done()
        await peer.close()


async def test_without_its_service_requests_are_refused(port: int) -> None:
    async with remoting_over(None, url=f"http://127.0.0.1:{free_port()}") as (_, alone):
        peer = await RemotingPeer.connect(alone)
        assert (await peer.send(b"x")).code == ResultCode.SERVICE_NOT_AVAILABLE
        # A consumer starts, and its pulls are refused until the service is there.
        assert (await peer.heartbeat(producers=("shop",), consumers={"points": "*"})).code == ResultCode.SUCCESS
        assert (await peer.pull(0)).code == ResultCode.SERVICE_NOT_AVAILABLE
        await peer.close()


async def test_the_port_is_an_option(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, "http://127.0.0.1:9", "--remoting-port", "0")
    await gateway.start()
    try:
        await serves(gateway.remoting_port)
        taken = ["--port", "0", "--remoting-port", str(gateway.remoting_port)]
        ran = subprocess.run(
            [sys.executable, "-m", "app.cli", "rocketmq", *taken], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (ran.returncode, "for remoting clients" in ran.stderr) == (1, True)
    finally:
        assert gateway.stop() == 0
    assert "Traceback" not in gateway.log.read_text()


@pytest.mark.parametrize("address", ["localhost", "localhost:x", "a:1;b:2", "[::1]:1", "0.0.0.0:9876"])
def test_an_address_that_clients_cannot_use_is_refused(address: str, run_alone: Run) -> None:
    refusal = run_alone("rocketmq", "--remoting-port", "0", "--remoting-address", address)
    assert (refusal.code, "--remoting-address is " in refusal.err) == (2, True)


async def test_a_connection_that_comes_as_a_gateway_stops_is_not_served() -> None:
    async with remoting_over(None) as (gateway, _):
        await gateway.stop()
        # The loop may begin a connection after the stop that it took before. So it does here.
        async with await asyncio.start_server(gateway._server._connected, "127.0.0.1", 0) as late:
            peer = await RemotingPeer.connect(late.sockets[0].getsockname()[1])
            await peer.ended()
            assert len(gateway._server) == 0
            await peer.close()
