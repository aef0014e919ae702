"""The socket by which API processes wake the worker beside them, and NOTIFY where it cannot be reached."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from app.clock import Clock
from app.config import Settings
from app.database.connection import Connection, Database
from app.database.notifier import PAYLOAD_MAX_BYTES, WakeUps
from app.relay import loop
from app.relay.loop import Relay
from app.runtime import wake_up_socket, worker_state
from app.runtime.publications import Publications
from app.runtime.wake_up_socket import Topics, WakeUpReceiver, WakeUpSender, join_worker_beside
from app.store.relay import log
from app.store.relay.log import Logged, Read, Reader
from app.topic_patterns import TopicPatterns
from tests.conftest import assembled, client_of
from tests.support.check_responder import Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

PATH = "wake-ups"
Make = Callable[[str], WakeUps]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return the wake-ups of a process in a role, beside the others that this returns."""
    monkeypatch.setenv(worker_state.VARIABLE, str(tmp_path / "worker.json"))
    joined = []

    def make(role: str) -> WakeUps:
        wake_ups = WakeUps(Database("postgresql://127.0.0.1:1/none", pool_size=1))
        publications = Publications(wake_ups, Clock())
        joined.append(join_worker_beside(wake_ups, role, publications.received))
        return wake_ups

    yield make
    for one in joined:
        if one is not None:
            one.close()


async def until(reached: Callable[[], bool]) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(10):
        while not reached():
            await asyncio.sleep(0.001)


async def test_a_publication_wakes_the_worker_and_notifies_nobody(beside: Make) -> None:
    worker, *apis = beside("worker"), beside("api"), beside("api")
    worker.interest, worker.elsewhere = TopicPatterns(["order"]), TopicPatterns([])
    for api in apis:
        worker.take()
        worker.relay.clear()
        api.published(["order"])
        await until(worker.relay.is_set)
        assert worker.take().published
        assert not api.notify_due.is_set()
    assert not worker.notify_due.is_set()


async def test_the_worker_notifies_the_relays_of_other_machines(beside: Make) -> None:
    worker, api = beside("worker"), beside("api")
    worker.interest, worker.elsewhere = TopicPatterns(["order"]), TopicPatterns(["bill"])
    api.published(["bill"])
    await until(worker.notify_due.is_set)
    assert not worker.relay.is_set()
    assert not api.notify_due.is_set()


async def test_an_unknown_topic_wakes_a_worker_with_any_stream(beside: Make) -> None:
    worker, api = beside("worker"), beside("api")
    worker.interest, worker.elsewhere = TopicPatterns(["order"]), TopicPatterns([])
    for topics in (None, [f"topic-{n}" for n in range(PAYLOAD_MAX_BYTES // 6)]):
        api.published(topics)
        await until(worker.relay.is_set)
        worker.relay.clear()


async def test_without_a_worker_others_are_notified(beside: Make, tmp_path: Path) -> None:
    api = beside("api")
    api.published(["order"])
    assert api.notify_due.is_set()
    # The socket that a killed worker leaves.
    left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.bind(str(tmp_path / PATH))
    left.close()
    api = beside("api")
    api.published(["order"])
    assert api.notify_due.is_set()
    # The next worker takes its place.
    worker, api = beside("worker"), beside("api")
    api.published(["order"])
    await until(worker.relay.is_set)
    assert not api.notify_due.is_set()


async def test_a_worker_that_reads_no_more_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_up_socket, "REST_S", 0.0)
    left: list[Topics] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as hung:
        hung.bind(str(tmp_path / PATH))
        sender = WakeUpSender(tmp_path / PATH, left.append)
        for _ in range(100_000):
            sender.published(["order"])
            if left:
                break
        sender.close()
    assert left == [{"order"}]


async def test_a_worker_that_drains_leaves_the_others_to_notify(beside: Make, tmp_path: Path) -> None:
    receiver = WakeUpReceiver(tmp_path / PATH, lambda *received: pytest.fail(f"received: {received}"))
    api = beside("api")
    receiver.begin_drain()
    api.published(["order"])
    assert api.notify_due.is_set()
    receiver.close()


async def test_a_slow_worker_takes_all_that_waits_in_one_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_up_socket, "REST_S", 0.0)
    received: list[Topics] = []
    receiver = WakeUpReceiver(tmp_path / PATH, lambda topics, messages, complete: received.append(topics))
    sender = WakeUpSender(tmp_path / PATH, lambda topics: pytest.fail(f"not sent: {topics}"))
    for number in range(8):
        sender.published([f"topic-{number}"])
    receiver._readable()
    assert received == [[f"topic-{number}"] for number in range(8)]
    sender.close()
    receiver.close()


async def test_publications_within_the_rest_share_a_datagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake_up_socket, "REST_S", 3600.0)
    received: list[Topics] = []
    receiver = WakeUpReceiver(tmp_path / PATH, lambda topics, messages, complete: received.append(topics))
    sender = WakeUpSender(tmp_path / PATH, lambda topics: pytest.fail(f"not sent: {topics}"))
    for number in range(4):
        sender.published([f"topic-{number}"])
    await until(lambda: len(received) == 1)
    sender.close()
    await until(lambda: len(received) == 2)
    assert received == [["topic-0"], ["topic-1", "topic-2", "topic-3"]]
    receiver.close()
    assert not (tmp_path / PATH).exists()


async def test_what_is_published_within_the_rest_is_sent_after_it(tmp_path: Path) -> None:
    received: list[Topics] = []
    receiver = WakeUpReceiver(tmp_path / PATH, lambda topics, messages, complete: received.append(topics))
    sender = WakeUpSender(tmp_path / PATH, lambda topics: pytest.fail(f"not sent: {topics}"))
    for topics in (["topic-0"], ["topic-1"], None):
        sender.published(topics)
    await until(lambda: None in received)
    sender.close()
    receiver.close()


def logged(offset: int, body: bytes = b"1", **fields: str | None) -> Logged:
    """Return a message as the log has it."""
    key, headers = fields.get("key"), fields.get("headers")
    at = datetime(2026, 11, 25, 12, 0, 0, 123456, UTC)
    return (offset, UUID(int=offset), 0, "order", key, None, None, at, "shop", headers, "text/plain", body, None)


Datagram = tuple[Topics, list[Logged], bool]


@pytest.fixture
async def passed(tmp_path: Path) -> AsyncIterator[tuple[WakeUpSender, list[Datagram]]]:
    """Return a sender, and what the receiver gets."""
    received: list[Datagram] = []
    receiver = WakeUpReceiver(
        tmp_path / PATH, lambda topics, messages, complete: received.append((topics, list(messages), complete))
    )
    sender = WakeUpSender(tmp_path / PATH, lambda topics: pytest.fail(f"not sent: {topics}"))
    yield sender, received
    sender.close()
    receiver.close()


async def test_messages_arrive_as_they_were_sent(passed: tuple[WakeUpSender, list[Datagram]]) -> None:
    sender, received = passed
    messages = [logged(1), logged(2, b"\x00\xff", key="ä" * 200, headers='{"a":"1"}'), logged(2**62, b"")]
    for complete in (True, False):
        sender.published(["order"], messages, complete)
    await until(lambda: len(received) == 2)
    assert received == [(["order"], messages, True), (["order"], messages, False)]


@pytest.mark.parametrize(("theirs", "own"), [(1, 2), (2, 1)], ids=["a former primary", "a promoted server"])
async def test_messages_of_another_timeline_are_not_taken(tmp_path: Path, theirs: int, own: int) -> None:
    """Servers before and after a promotion give the same offsets to different messages."""
    received: list[Datagram] = []
    receiver = WakeUpReceiver(
        tmp_path / PATH,
        lambda topics, messages, complete: received.append((topics, list(messages), complete)),
        lambda: own,
    )
    sender = WakeUpSender(tmp_path / PATH, lambda topics: pytest.fail(f"not sent: {topics}"), lambda: theirs)
    sender.published(["order"], [logged(1)], True)
    await until(lambda: len(received) == 1)
    assert received == [(["order"], [], False)]
    sender.close()
    receiver.close()


async def test_many_messages_take_several_datagrams(passed: tuple[WakeUpSender, list[Datagram]]) -> None:
    sender, received = passed
    messages = [logged(number, b"x" * 20_000) for number in range(1, 12)]
    sender.published({"order"}, messages, True)
    await until(lambda: sum(len(found) for _, found, _ in received) == 11)
    assert len(received) > 1
    assert [message for _, found, _ in received for message in found] == messages
    assert all(complete for _, _, complete in received)


async def test_a_message_without_room_in_a_datagram_is_named_by_its_topic(
    passed: tuple[WakeUpSender, list[Datagram]],
) -> None:
    sender, received = passed
    large = logged(2, b"x" * wake_up_socket.DATAGRAM_MAX_BYTES)
    sender.published({"order"}, [large], True)
    await until(lambda: len(received) == 1)
    assert received == [(["order"], [], False)]
    received.clear()
    sender.published({"order"}, [logged(1), large, logged(3)], True)
    await until(lambda: sum(len(found) for _, found, _ in received) == 2)
    assert [message[0] for _, found, _ in received for message in found] == [1, 3]
    # The relay must read the log.
    assert not all(complete for _, _, complete in received)


async def test_the_worker_delivers_what_the_api_process_committed_without_a_read(
    settings: Settings, dsn: str, group: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(worker_state.VARIABLE, str(tmp_path / "worker.json"))
    reads: list[int] = []

    async def window(connection: Connection, reader: Reader, after: int, at_most: int) -> Read:
        reads.append(after)
        return await log.window(connection, reader, after, at_most)

    async with AsyncExitStack() as stack, Responder() as receiver:
        worker, api = [
            await stack.enter_async_context(assembled(settings.model_copy(update={"role": role}), dsn))
            for role in ("worker", "api")
        ]
        async with client_of(api) as client:
            await subscribe(client, receiver)
            relay = Relay(worker)
            await turn_until(relay, worker, lambda: relay.streams)
            await step(relay, worker)
            monkeypatch.setattr(loop, "window", window)
            await publish(client, order(1), order(2))
            half = await client.post("/half", json={"producer_group": "shop", "messages": [order(3)]})
            end = {"transaction_id": half.json()["transaction_id"], "producer_group": "shop", "verdict": "commit"}
            await client.post("/end", json=end)
            await until(lambda: len(receiver.calls) == 3)
        assert sorted(offsets(receiver)) == [1, 2, 3]
        assert reads == []
        await relay.drain(worker)


async def test_a_worker_without_a_socket_serves_by_notify(beside: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(worker_state.VARIABLE, f"/tmp/{'long' * 50}/worker.json")
    with capture_logs() as logs:
        beside("worker")
    assert [one["event"] for one in logs] == ["wake_up_socket_unavailable"]
    api = beside("api")
    api.published(["order"])
    assert api.notify_due.is_set()


async def test_a_process_of_its_own_has_no_socket(beside: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(worker_state.VARIABLE)
    process = beside("all")
    assert process.worker is None
    process.published(["order"])
    assert process.notify_due.is_set()
