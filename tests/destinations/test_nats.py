"""NATS JetStream as a destination, against a real nats-server."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import nats
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from app.delivery import Delivered, Failed, Refused
from app.destinations.base import Destination
from app.destinations.nats import BATCH_MAX, of
from app.egress.denied_addresses import Network
from app.egress.network_policy import NetworkPolicy
from tests.support import brokers
from tests.support.deliveries import (
    ELSEWHERE,
    LOOPBACK,
    NOW,
    certificate,
    delivery,
    full_delivery,
    open_tasks_and_sockets,
)
from tests.support.faulty_proxy import FaultyProxy


@asynccontextmanager
async def destination(
    url: str,
    *,
    timeout_s: float = 20,
    networks: tuple[Network, ...] = LOOPBACK,
    credentials: dict[str, str] | None = None,
    **fields: Any,
) -> AsyncIterator[Destination]:
    """Yield the NATS destination of a subscription."""
    opened = of({"type": "nats", "url": url, **fields}, credentials or {}, timeout_s, NetworkPolicy(opened=networks))
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def jetstream(server: brokers.Server, **options: Any) -> AsyncIterator[JetStreamContext]:
    """Yield a JetStream client of the test, to create and read streams."""
    client = await nats.connect(server.url, allow_reconnect=False, **options)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def first_messages(js: JetStreamContext, stream: str, count: int) -> list[Msg]:
    """Return the first messages of a stream."""
    subscription = await js.subscribe("", stream=stream, ordered_consumer=True)
    found = [await subscription.next_msg(timeout=20) for _ in range(count)]
    await subscription.unsubscribe()
    return found


@pytest.fixture
def name() -> str:
    """Return a name that only this test uses, for topics, subjects and streams."""
    return f"orders-{uuid4()}"


async def test_a_consumer_gets_the_body_and_every_attribute(name: str) -> None:
    server = brokers.nats()
    sent = full_delivery(name)
    async with jetstream(server) as js, destination(server.url) as jet:
        await js.add_stream(name=name, subjects=[name])
        [outcome] = await jet.deliver([sent], NOW)
        [message] = await first_messages(js, name, 1)
    assert isinstance(outcome, Delivered)
    assert message.data == bytes(range(256))
    assert message.headers == {
        "Nats-Msg-Id": f"{sent.message_id}:orders-out:7",
        "ce-specversion": "1.0",
        "ce-id": sent.message_id,
        "ce-source": "/producer-groups/shop",
        "ce-type": name,
        "ce-subject": "caf%C3%A9%20%221%22",
        "ce-time": "2026-11-21T10:00:00.123456Z",
        "ce-datacontenttype": "application/octet-stream",
        "ce-halfnotetransaction": str(sent.transaction_id),
        "ce-halfnoteoffset": "1030",
        "ce-halfnoteattempt": "3",
        "ce-halfnotesubscription": "orders-out",
        "ce-halfnotetag": "new",
        "ce-halfnotereplay": "7",
        "halfnote-transaction": str(sent.transaction_id),
        "halfnote-offset": "1030",
        "halfnote-attempt": "3",
        "halfnote-subscription": "orders-out",
        "halfnote-tag": "new",
        "halfnote-replay": "7",
        "halfnote-h-trace": "50%25%20%C3%B6ff",
    }


async def test_placeholders_make_the_subject_and_values_stay_one_token(name: str) -> None:
    server = brokers.nats()
    async with jetstream(server) as js, destination(server.url, subject=name + ".{group}.{topic}.{tag}.{key}") as jet:
        await js.add_stream(name=name, subjects=[f"{name}.>"])
        deliveries = [
            delivery(topic="billing.paid", tag="*", key="a.b > c\u00e9\r\n~_-"),
            delivery(topic="bill ing", tag=None, key=None),
            delivery(topic="billing..paid"),
            delivery(topic="order", key="\u00e9" * 255, tag="\u20ac" * 255),
        ]
        outcomes = await jet.deliver(deliveries, NOW)
        messages = await first_messages(js, name, 2)
    assert [type(outcome) for outcome in outcomes] == [Delivered, Delivered, Refused, Delivered]
    assert [message.subject for message in messages] == [
        f"{name}.shop.billing.paid.%2A.a%2Eb%20%3E%20c%C3%A9%0D%0A%7E_-",
        f"{name}.shop.bill%20ing._._",
    ]


async def test_a_subject_too_long_is_refused_alone(name: str) -> None:
    server = brokers.nats()
    async with jetstream(server) as js, destination(server.url, subject=name + ".{key}.{tag}") as jet:
        await js.add_stream(name=name, subjects=[f"{name}.>"])
        outcomes = await jet.deliver([delivery(key="\u20ac" * 255, tag="\u20ac" * 255), delivery()], NOW)
    refused, delivered = outcomes
    assert isinstance(refused, Refused)
    assert "a subject of 4,6" in refused.error
    assert isinstance(delivered, Delivered)


@pytest.mark.parametrize("place", [0, 6], ids=["first", "last"])
async def test_a_message_without_an_answer_fails_alone(name: str, place: int) -> None:
    server, silent = brokers.nats(), f"{name}-silent"

    async def take(message: Msg) -> None:
        """Do not answer."""

    topics = [name] * 6
    topics.insert(place, silent)
    async with jetstream(server) as js, destination(server.url, timeout_s=3) as jet:
        await js.add_stream(name=name, subjects=[name])
        # A subscriber of the subject, without a stream: NATS itself answers nothing.
        await js._nc.subscribe(silent, cb=take)
        await js._nc.flush()
        outcomes = list(await jet.deliver([delivery(topic=topic) for topic in topics], NOW))
    failed = outcomes.pop(place)
    assert isinstance(failed, Failed)
    assert (failed.error, failed.unreachable) == ("no acknowledgement within 3 s", False)
    assert [type(outcome) for outcome in outcomes] == [Delivered] * 6


async def test_a_repeat_is_stored_once_but_a_replay_and_another_subscription_again(name: str) -> None:
    server = brokers.nats()
    sent = delivery(topic=name)
    again = [
        delivery(topic=name, message_id=sent.message_id, attempt=2),
        delivery(topic=name, message_id=sent.message_id, replay="1"),
        delivery(topic=name, message_id=sent.message_id, subscription="others"),
    ]
    async with jetstream(server) as js, destination(server.url) as jet:
        await js.add_stream(name=name, subjects=[name])
        outcomes = await jet.deliver([sent, *again], NOW)
        stored = (await js.stream_info(name)).state.messages
    assert all(isinstance(outcome, Delivered) for outcome in outcomes)
    assert stored == 3


async def test_without_a_stream_the_delivery_fails_and_says_what_to_create(name: str) -> None:
    server = brokers.nats()
    async with jetstream(server) as js, destination(server.url) as jet:
        [before] = await jet.deliver([delivery(topic=name)], NOW)
        await js.add_stream(name=name, subjects=[name])
        [after] = await jet.deliver([delivery(topic=name)], NOW)
    assert isinstance(before, Failed)
    assert f"no JetStream stream has the subject {name}: create one" in before.error
    assert not before.unreachable
    assert isinstance(after, Delivered)


@pytest.mark.parametrize(
    "answer",
    [b"", b"thanks", b"[]", b"{}", b'{"ok":true}', b'{"error":"none"}', b'{"stream":"s"}', b'{"stream":"s","seq":"1"}'],
)
async def test_an_answer_of_another_subscriber_is_no_acknowledgement(name: str, answer: bytes) -> None:
    server = brokers.nats()

    async def reply(message: Msg) -> None:
        await message.respond(answer)

    client = await nats.connect(server.url, allow_reconnect=False)
    try:
        await client.subscribe(name, cb=reply)
        # The server knows of the subscription when it answers a ping.
        await client.flush()
        async with destination(server.url) as jet:
            [outcome] = await jet.deliver([delivery(topic=name)], NOW)
    finally:
        await client.close()
    assert isinstance(outcome, Failed)
    assert "a subscriber listens on the subject too" in outcome.error
    assert not outcome.unreachable


async def test_a_full_stream_fails(name: str) -> None:
    server = brokers.nats()
    async with jetstream(server) as js, destination(server.url) as jet:
        await js.add_stream(name=name, subjects=[name], max_msgs=1, discard="new")
        first, second = await jet.deliver([delivery(topic=name), delivery(topic=name)], NOW)
    assert isinstance(first, Delivered)
    assert isinstance(second, Failed)
    assert "JetStream did not store it: maximum messages exceeded" in second.error


async def test_a_message_too_large_is_refused_with_the_sizes_and_the_others_are_delivered(name: str) -> None:
    server = brokers.nats()
    limit = brokers.NATS_LARGEST_BYTES
    bodies = [b"small", b"x" * (limit + 1), b"x" * (limit - 100), b"x" * (limit - 4096), b"small too"]
    async with FaultyProxy(server.port) as proxy, jetstream(server) as js:
        await js.add_stream(name=name, subjects=[name])
        async with destination(f"nats://127.0.0.1:{proxy.port}") as jet:
            outcomes = await jet.deliver([delivery(topic=name, body=body) for body in bodies], NOW)
            assert proxy.connections == 1
    assert [type(outcome) for outcome in outcomes] == [Delivered, Refused, Refused, Delivered, Delivered]
    for refused in outcomes[1:3]:
        assert isinstance(refused, Refused)
        assert refused.reason == "too_large"
        assert "bytes with headers; this NATS takes at most 5,242,880 (max_payload)" in refused.error


async def test_a_message_too_large_for_the_stream_is_refused(name: str) -> None:
    server = brokers.nats()
    async with jetstream(server) as js, destination(server.url) as jet:
        await js.add_stream(name=name, subjects=[name], max_msg_size=2_000)
        small, large = await jet.deliver([delivery(topic=name), delivery(topic=name, body=b"x" * 3_000)], NOW)
    assert isinstance(small, Delivered)
    assert isinstance(large, Refused)
    assert "a body of 3,000 bytes; the stream takes less (max_msg_size)" in large.error


async def test_a_thousand_at_once_are_all_acknowledged_on_one_connection(name: str) -> None:
    server = brokers.nats()
    deliveries = [delivery(topic=name, body=str(number).encode()) for number in range(1_000)]
    calls = [deliveries[:BATCH_MAX], *([one] for one in deliveries[BATCH_MAX:])]
    async with FaultyProxy(server.port) as proxy, jetstream(server) as js:
        await js.add_stream(name=name, subjects=[name])
        async with destination(f"nats://127.0.0.1:{proxy.port}") as jet:
            outcomes = await asyncio.gather(*(jet.deliver(call, NOW) for call in calls))
            assert proxy.connections == 1
        messages = await first_messages(js, name, 1_000)
    assert all(isinstance(outcome, Delivered) for call in outcomes for outcome in call)
    assert {int(message.data) for message in messages} == set(range(1_000))
    # The messages of one call keep their order.
    first = [int(message.data) for message in messages if int(message.data) < BATCH_MAX]
    assert first == sorted(first)


async def test_a_stopped_server_is_unreachable_until_it_runs_again(name: str) -> None:
    with brokers.own("nats") as server:
        async with destination(server.url, timeout_s=5) as jet:
            async with jetstream(server) as js:
                await js.add_stream(name=name, subjects=[name])
            [before] = await jet.deliver([delivery(topic=name, body=b"1")], NOW)
            await asyncio.to_thread(server.stop)
            meanwhile = await asyncio.gather(*(jet.deliver([delivery(topic=name, body=b"x")], NOW) for _ in range(10)))
            await asyncio.to_thread(server.start)
            [after] = await jet.deliver([delivery(topic=name, body=b"2")], NOW)
            async with jetstream(server) as js:
                messages = await first_messages(js, name, 2)
                stored = (await js.stream_info(name)).state.messages
    assert isinstance(before, Delivered)
    for [outcome] in meanwhile:
        assert isinstance(outcome, Failed)
        assert outcome.unreachable
    assert isinstance(after, Delivered)
    # No failed message was buffered and sent later.
    assert [message.data for message in messages] == [b"1", b"2"]
    assert stored == 2


async def test_each_message_has_an_outcome_when_the_server_is_killed(name: str) -> None:
    with brokers.own("nats") as server:
        async with destination(server.url, timeout_s=3) as jet:
            async with jetstream(server) as js:
                await js.add_stream(name=name, subjects=[name])
            calls = [
                asyncio.create_task(jet.deliver([delivery(topic=name, body=b"x" * 100_000) for _ in range(20)], NOW))
                for _ in range(20)
            ]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.to_thread(server.kill)
            outcomes = [outcome for call in calls for outcome in await call]
    assert len(outcomes) == 400
    assert {type(outcome) for outcome in outcomes} <= {Delivered, Failed}
    assert any(isinstance(outcome, Delivered) for outcome in outcomes)


async def test_a_cut_connection_is_replaced_within_the_call(name: str) -> None:
    server = brokers.nats()
    async with FaultyProxy(server.port) as proxy, jetstream(server) as js:
        await js.add_stream(name=name, subjects=[name])
        async with destination(f"nats://127.0.0.1:{proxy.port}") as jet:
            [first] = await jet.deliver([delivery(topic=name)], NOW)
            proxy.hold()
            calls = asyncio.gather(*(jet.deliver([delivery(topic=name)], NOW) for _ in range(20)))
            await asyncio.wait({calls}, timeout=0.05)
            assert not calls.done()
            proxy.cut()
            proxy.release()
            others = await calls
            assert proxy.connections == 2
    assert all(isinstance(outcome, Delivered) for [outcome] in [[first], *others])


async def test_a_call_to_a_silent_server_ends_in_time_and_the_next_one_reconnects(name: str) -> None:
    server = brokers.nats()
    async with FaultyProxy(server.port) as proxy, jetstream(server) as js:
        await js.add_stream(name=name, subjects=[name])
        async with destination(f"nats://127.0.0.1:{proxy.port}", timeout_s=2) as jet:
            [first] = await jet.deliver([delivery(topic=name)], NOW)
            proxy.hold()
            unanswered = await jet.deliver([delivery(topic=name, body=b"x" * 4_000_000) for _ in range(5)], NOW)
            proxy.release()
            [after] = await jet.deliver([delivery(topic=name)], NOW)
            assert proxy.connections == 2
    assert isinstance(first, Delivered)
    for outcome in unanswered:
        assert isinstance(outcome, Failed)
        assert outcome.error == "no acknowledgement within 2 s"
        assert not outcome.unreachable
    assert isinstance(after, Delivered)


async def test_a_server_that_sends_nothing_is_unreachable() -> None:
    before = open_tasks_and_sockets()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with destination(f"nats://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.3) as jet:
            outcomes = await asyncio.gather(*(jet.deliver([delivery()], NOW) for _ in range(3)))
        assert open_tasks_and_sockets()[0] == before[0]
    for [outcome] in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.error == "no connection within 0.3 s"
        assert outcome.unreachable


async def test_an_address_that_is_not_allowed_is_not_dialed() -> None:
    server = brokers.nats()
    async with (
        FaultyProxy(server.port) as proxy,
        destination(f"nats://localhost:{proxy.port}", networks=ELSEWHERE) as jet,
    ):
        [outcome] = await jet.deliver([delivery()], NOW)
        assert proxy.connections == 0
    assert isinstance(outcome, Failed)
    assert "HALFNOTE_ALLOW_NETWORKS" in outcome.error
    assert outcome.unreachable


async def test_accounts_passwords_and_permissions(name: str) -> None:
    with brokers.own("nats") as server:
        allowed = f'permissions: {{ publish: ["{name}", "$JS.API.>", "_INBOX.>"] }}'
        user = f'{{ user: "u", password: "right", {allowed} }}'
        await asyncio.to_thread(server.reconfigure, f"authorization {{ users = [{user}] }}\n")
        async with jetstream(server, user="u", password="right") as js:
            await js.add_stream(name=name, subjects=[name, f"{name}.Forbidden"])
        async with destination(server.url, username="u", credentials={"password": "right"}) as jet:
            permitted, forbidden = await jet.deliver(
                [delivery(topic=name), delivery(topic=f"{name}.Forbidden")],
                NOW,
            )
        async with destination(server.url, username="u", credentials={"password": "not-it"}) as jet:
            [wrong] = await jet.deliver([delivery(topic=name)], NOW)
        async with destination(server.url) as jet:
            [none] = await jet.deliver([delivery(topic=name)], NOW)
    assert isinstance(permitted, Delivered)
    assert isinstance(forbidden, Failed)
    assert forbidden.error == f"NATS does not permit this account to publish to {name}.Forbidden"
    for refused in (wrong, none):
        assert isinstance(refused, Failed)
        assert "Authorization Violation" in refused.error
        assert "not-it" not in refused.error
        assert refused.unreachable


async def test_a_token_is_accepted(name: str) -> None:
    with brokers.own("nats") as server:
        await asyncio.to_thread(server.reconfigure, 'authorization { token: "right" }\n')
        async with jetstream(server, token="right") as js:
            await js.add_stream(name=name, subjects=[name])
        async with destination(server.url, credentials={"token": "right"}) as jet:
            [outcome] = await jet.deliver([delivery(topic=name)], NOW)
    assert isinstance(outcome, Delivered)


async def test_tls_is_required_and_verified_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate_file, key_file = certificate(tmp_path, "localhost")
    with brokers.own("nats") as server:
        plain = f"tls://localhost:{server.port}"
        async with destination(plain, username="u", credentials={"password": "secret"}) as jet:
            [no_tls] = await jet.deliver([delivery(topic=name)], NOW)
        async with jetstream(server) as js:
            await js.add_stream(name=name, subjects=[name])
        await asyncio.to_thread(
            server.reconfigure, f'tls {{ cert_file: "{certificate_file}", key_file: "{key_file}" }}\n'
        )
        async with destination(plain) as jet:
            [unknown] = await jet.deliver([delivery(topic=name)], NOW)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate_file))
        async with destination(plain) as jet:
            [trusted] = await jet.deliver([delivery(topic=name)], NOW)
        async with destination(f"tls://127.0.0.1:{server.port}") as jet:
            [other_name] = await jet.deliver([delivery(topic=name)], NOW)
    assert isinstance(no_tls, Failed)
    assert no_tls.error == "NATS offers no TLS at this address, and tls:// requires it"
    for refused in (unknown, other_name):
        assert isinstance(refused, Failed)
        assert "CERTIFICATE_VERIFY_FAILED" in refused.error
    assert isinstance(trusted, Delivered)


async def test_close_leaves_no_task_and_no_socket(name: str) -> None:
    server = brokers.nats()
    async with jetstream(server) as js:
        await js.add_stream(name=name, subjects=[name])
        before = open_tasks_and_sockets()
        async with destination(server.url) as jet:
            await jet.deliver([delivery(topic=name)], NOW)
            assert open_tasks_and_sockets() != before
        assert open_tasks_and_sockets() == before
