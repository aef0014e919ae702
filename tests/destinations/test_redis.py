"""Redis Streams as a destination, against a real redis-server."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis import asyncio as client

from app.delivery import Delivered, Failed, Refused
from app.destinations.base import Destination
from app.destinations.redis import of
from app.egress.denied_addresses import Network
from app.egress.network_policy import NetworkPolicy
from tests.support import brokers
from tests.support.brokers import Server
from tests.support.deliveries import (
    ELSEWHERE,
    LOOPBACK,
    NOW,
    certificate,
    delivery,
    full_attributes,
    full_delivery,
    open_tasks_and_sockets,
)
from tests.support.faulty_proxy import FaultyProxy


@asynccontextmanager
async def destination(
    server: Server,
    *,
    timeout_s: float = 10,
    networks: tuple[Network, ...] = LOOPBACK,
    password: str | None = None,
    **fields: Any,
) -> AsyncIterator[Destination]:
    """Yield the Redis destination of a subscription, on database 0."""
    stored = {"type": "redis", "url": f"{server.url}/0", **fields}
    opened = of(stored, {"password": password} if password else {}, timeout_s, NetworkPolicy(opened=networks))
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def redis_client(server: Server, **options: Any) -> AsyncIterator[client.Redis]:
    """Yield a Redis client of the test."""
    async with client.Redis(host=server.host, port=server.port, **options) as opened:
        yield opened


async def entries(server: Server, stream: str) -> list[dict[bytes, bytes]]:
    """Return the fields of all entries of a stream."""
    async with redis_client(server, protocol=2) as redis:
        found = await redis.xread({stream: "0"})
    return [fields for _, listed in found for _, fields in listed]


@pytest.fixture
def topic() -> str:
    """Return a topic, and so a stream, that only this test uses."""
    return f"orders-{uuid4()}"


async def test_a_consumer_reads_the_body_and_every_attribute(topic: str) -> None:
    server = brokers.redis()
    sent = full_delivery(topic)
    async with destination(server) as redis:
        [outcome] = await redis.deliver([sent], NOW)
    assert isinstance(outcome, Delivered)
    [entry] = await entries(server, topic)
    assert {name.decode(): value for name, value in entry.items()} == {"body": sent.body, **full_attributes(sent)}


async def test_an_entry_has_no_fields_for_what_the_message_lacks(topic: str) -> None:
    server = brokers.redis()
    async with destination(server) as redis:
        await redis.deliver([delivery(topic=topic, key=None, body=b"")], NOW)
    [entry] = await entries(server, topic)
    assert entry[b"body"] == b""
    assert not {b"ce_subject", b"halfnote-tag", b"halfnote-replay", b"ce_halfnotetag", b"ce_halfnotereplay"} & {*entry}


async def test_streams_are_named_by_placeholders_and_trimmed(topic: str) -> None:
    server = brokers.redis()
    async with destination(server, stream="{topic}:{key}", maxlen=100) as redis:
        outcomes = await redis.deliver([delivery(topic=topic, key="a") for _ in range(500)], NOW)
        await redis.deliver([delivery(topic=topic, key="b")], NOW)
    assert {type(outcome) for outcome in outcomes} == {Delivered}
    # Redis trims whole nodes of 100 entries.
    assert 100 <= len(await entries(server, f"{topic}:a")) <= 200
    assert len(await entries(server, f"{topic}:b")) == 1


async def test_many_calls_at_once_are_all_acknowledged_and_in_order(topic: str) -> None:
    server = brokers.redis()
    sent = [delivery(topic=topic, offset=offset, key=f"k{offset % 7}") for offset in range(1, 1001)]
    async with destination(server) as redis:
        outcomes = await asyncio.gather(*(redis.deliver([one], NOW) for one in sent))
    assert {type(outcome) for [outcome] in outcomes} == {Delivered}
    assert [int(entry[b"halfnote-offset"]) for entry in await entries(server, topic)] == list(range(1, 1001))


async def test_an_entry_that_fails_does_not_affect_the_others(topic: str) -> None:
    server = brokers.redis()
    async with redis_client(server) as redis:
        await redis.set(f"{topic}-taken", "no stream")
    async with destination(server) as redis:
        outcomes = await redis.deliver(
            [delivery(topic=f"{topic}-taken" if offset == 3 else topic, offset=offset) for offset in range(1, 11)], NOW
        )
    failed = outcomes.pop(2)
    assert isinstance(failed, Failed)
    assert f"the key {topic}-taken holds another type than a stream" in failed.error
    assert "WRONGTYPE" in str(failed.response)
    assert not failed.unreachable
    assert {type(outcome) for outcome in outcomes} == {Delivered}
    assert len(await entries(server, topic)) == 9


async def test_only_a_body_too_large_for_the_server_is_refused(topic: str) -> None:
    with brokers.own("redis") as server:
        async with redis_client(server) as redis:
            await redis.config_set("proto-max-bulk-len", 1024 * 1024)
        async with destination(server) as redis:
            outcomes = await redis.deliver(
                [delivery(topic=topic, body=b"x" * (1024 * 1024 + (size == 5))) for size in range(10)], NOW
            )
            async with redis_client(server) as inspector:
                await inspector.config_set("proto-max-bulk-len", 2 * 1024 * 1024)
            [raised] = await redis.deliver([delivery(topic=topic, body=b"x" * (1024 * 1024 + 1))], NOW)
        assert isinstance(raised, Delivered)
        refused = outcomes.pop(5)
        assert isinstance(refused, Refused)
        assert refused.reason == "too_large"
        assert "1,048,577 bytes" in refused.error
        assert "1,048,576" in refused.error
        assert {type(outcome) for outcome in outcomes} == {Delivered}
        assert len(await entries(server, topic)) == 10


async def test_a_body_that_redis_itself_refuses_is_refused(topic: str) -> None:
    """Without permission for CONFIG the limit is not known in advance."""
    with brokers.own("redis") as server:
        async with redis_client(server) as redis:
            await redis.config_set("proto-max-bulk-len", 1024 * 1024)
            await redis.acl_setuser("writer", enabled=True, passwords=["+pw"], keys="*", commands=["+xadd", "+client"])
        async with destination(server, username="writer", password="pw") as redis:
            [first] = await redis.deliver([delivery(topic=topic)], NOW)
            [large] = await redis.deliver([delivery(topic=topic, body=b"x" * (1024 * 1024 + 1))], NOW)
            [after] = await redis.deliver([delivery(topic=topic)], NOW)
        assert isinstance(first, Delivered)
        # Redis closes the connection while the body is still being sent, so its answer may be lost.
        assert isinstance(large, Refused | Failed)
        assert isinstance(after, Delivered)


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [("maxmemory", "1", "maxmemory"), ("min-replicas-to-write", "1", "NOREPLICAS")],
)
async def test_a_server_that_accepts_no_writes_fails_with_the_reason(
    topic: str, setting: str, value: str, text: str
) -> None:
    with brokers.own("redis") as server:
        async with redis_client(server) as redis:
            await redis.config_set(setting, value)
        async with destination(server) as redis:
            [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
        assert isinstance(outcome, Failed)
        assert text in outcome.error
        assert not outcome.unreachable


async def test_a_replica_is_reconnected_to_and_used_once_it_is_the_primary(topic: str) -> None:
    with brokers.own("redis") as server:
        async with redis_client(server) as inspector, destination(server) as redis:
            await redis.deliver([delivery(topic=topic)], NOW)
            await inspector.replicaof(server.host, "1")
            [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
            assert isinstance(outcome, Failed)
            assert "replica" in outcome.error
            await inspector.replicaof("NO", "ONE")
            [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
            assert isinstance(outcome, Delivered)


async def test_a_server_that_is_down_is_unreachable_and_used_again_after_its_restart(topic: str) -> None:
    with brokers.own("redis") as server:
        async with destination(server) as redis:
            [before] = await redis.deliver([delivery(topic=topic, offset=1)], NOW)
            await asyncio.to_thread(server.stop)
            [down] = await redis.deliver([delivery(topic=topic, offset=2)], NOW)
            await asyncio.to_thread(server.start)
            [after] = await redis.deliver([delivery(topic=topic, offset=3)], NOW)
        assert isinstance(before, Delivered)
        assert isinstance(down, Failed)
        assert down.unreachable
        assert isinstance(after, Delivered)
        # The first entry was restored from the append-only file.
        assert [int(entry[b"halfnote-offset"]) for entry in await entries(server, topic)] == [1, 3]


async def test_an_idle_connection_that_was_reset_is_replaced(topic: str) -> None:
    server = brokers.redis()
    async with (
        FaultyProxy(server.port) as proxy,
        destination(server, url=f"redis://127.0.0.1:{proxy.port}/0") as redis,
    ):
        [before] = await redis.deliver([delivery(topic=topic, offset=1)], NOW)
        proxy.reset()
        after = await redis.deliver([delivery(topic=topic, offset=offset) for offset in range(2, 12)], NOW)
        assert proxy.connections == 2
    assert {type(outcome) for outcome in [before, *after]} == {Delivered}
    assert [int(entry[b"halfnote-offset"]) for entry in await entries(server, topic)] == list(range(1, 12))


async def test_a_pipeline_is_sent_again_only_if_it_was_sent_on_an_old_connection(topic: str) -> None:
    server = brokers.redis()
    async with (
        FaultyProxy(server.port) as proxy,
        destination(server, url=f"redis://127.0.0.1:{proxy.port}/0") as redis,
    ):
        found = []
        for _ in range(2):
            # The reply to XADD: an id of 15 bytes.
            proxy.hold_answer(b"$15\r\n")
            call = asyncio.create_task(redis.deliver([delivery(topic=topic)], NOW))
            await proxy.holding_answer.wait()
            proxy.holding_answer.clear()
            proxy.cut()
            found += await call
            if len(found) == 1:
                assert proxy.connections == 1
                found += await redis.deliver([delivery(topic=topic)], NOW)
        assert proxy.connections == 3
    new, meanwhile, old = found
    assert isinstance(new, Failed)
    assert not new.unreachable
    assert isinstance(meanwhile, Delivered)
    assert isinstance(old, Delivered)
    # The last message is there twice: Redis had added it before the connection was cut.
    assert len(await entries(server, topic)) == 4


async def test_calls_to_a_server_that_hangs_end_in_time_and_it_is_used_again(topic: str) -> None:
    with brokers.own("redis") as server:
        async with destination(server, timeout_s=0.5) as redis:
            await redis.deliver([delivery(topic=topic)], NOW)
            server.processes[0].send_signal(signal.SIGSTOP)
            calls = [redis.deliver([delivery(topic=topic, body=b"x" * 4_000_000)], NOW) for _ in range(10)]
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(*calls)
            server.processes[0].send_signal(signal.SIGCONT)
        assert {outcome.error for [outcome] in outcomes if isinstance(outcome, Failed)} == {"no answer within 0.5 s"}
        assert len(outcomes) == 10
        async with destination(server) as redis:
            [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
        assert isinstance(outcome, Delivered)


async def test_a_wrong_password_fails_with_the_reason_and_the_right_one_is_accepted(topic: str) -> None:
    with brokers.own("redis") as server:
        async with redis_client(server) as redis:
            await redis.config_set("requirepass", "right")
        for password, text in ((None, "Authentication required"), ("wrong", "invalid")):
            async with destination(server, password=password) as redis:
                [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
            assert isinstance(outcome, Failed)
            assert text.lower() in outcome.error.lower()
            assert "wrong" not in outcome.error
        async with destination(server, password="right") as redis:
            [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
        assert isinstance(outcome, Delivered)


async def test_with_tls_the_name_is_verified(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate_file, key_file = certificate(tmp_path, "localhost")
    with brokers.own("redis") as server:
        [port] = brokers.free_ports(1)
        async with redis_client(server) as redis:
            await redis.config_set(
                "tls-cert-file",
                str(certificate_file),
                "tls-key-file",
                str(key_file),
                "tls-ca-cert-file",
                str(certificate_file),
                "tls-auth-clients",
                "no",
                "tls-port",
                port,
            )
        outcomes = []
        for trusted, host in ((False, "localhost"), (True, "127.0.0.1"), (True, "localhost")):
            if trusted:
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file))
            async with destination(server, url=f"rediss://{host}:{port}/0") as redis:
                outcomes += await redis.deliver([delivery(topic=topic)], NOW)
        for failed in outcomes[:2]:
            assert isinstance(failed, Failed)
            assert failed.unreachable
            assert "certificate" in failed.error
        assert isinstance(outcomes[2], Delivered)
        assert len(await entries(server, topic)) == 1


async def test_an_address_outside_the_allowed_networks_is_not_dialed(topic: str) -> None:
    server = brokers.redis()
    async with redis_client(server) as inspector, destination(server, networks=ELSEWHERE) as redis:
        before = (await inspector.info("stats"))["total_connections_received"]
        [outcome] = await redis.deliver([delivery(topic=topic)], NOW)
        after = (await inspector.info("stats"))["total_connections_received"]
    assert isinstance(outcome, Failed)
    assert outcome.unreachable
    assert "HALFNOTE_ALLOW_NETWORKS" in outcome.error
    assert after == before


async def test_close_leaves_no_task_and_no_socket(topic: str) -> None:
    server = brokers.redis()
    before = open_tasks_and_sockets()
    async with destination(server) as redis:
        await asyncio.gather(*(redis.deliver([delivery(topic=topic)], NOW) for _ in range(10)))
        assert open_tasks_and_sockets() != before
    assert open_tasks_and_sockets() == before
