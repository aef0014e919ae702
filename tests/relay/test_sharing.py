"""Several relays over one database: which sends what, takeovers, stale holders, and the wake-ups between them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import timedelta

import asyncpg
import httpx
import pytest
from aiohttp import web

from app.config import Settings
from app.database.connection import Connection
from app.destinations.base import Destination
from app.destinations.registry import NotInstalled
from app.lifecycle.startup import assemble
from app.relay.loop import Relay
from app.relay.unrouted import Routing
from app.relay.wakeups import notify
from app.runtime.loop_runner import Loop, run
from app.runtime.state import Runtime
from app.store.subscriptions.subscriptions import Subscription
from tests.support.check_responder import Call, Responder
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

# Longer than any test runs: a message that arrives did not wait for a poll.
NEVER_S = 3600.0


@pytest.fixture
async def other(settings: Settings, dsn: str, group: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


def kill(relay: Relay) -> None:
    """End a relay as `kill -9` does: nothing is settled, no lease is released."""
    for stream in relay.streams.values():
        stream.drop()


def lags(runtime: Runtime) -> dict[str, float]:
    """Return how many messages each subscription is behind, by the metrics of this process."""
    seconds, messages = (
        {
            sample.labels["subscription"]: sample.value
            for family in runtime.metrics.registry.collect()
            if family.name == f"halfnote_relay_lag_{unit}"
            for sample in family.samples
        }
        for unit in ("seconds", "messages")
    )
    assert seconds.keys() == messages.keys()
    return messages


class BlockingReceiver:
    """A receiver that answers the first `free` requests at once and the others when `answered` is set."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self.receiver = Responder(self._answer)
        self.free = 0

    async def _answer(self, call: Call) -> web.Response:
        if len(self.receiver.calls) > self.free:
            await self.answered.wait()
        return web.Response()


async def test_after_a_takeover_only_what_has_no_receipt_is_sent(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    blocking = BlockingReceiver()
    blocking.free = 5
    first, second = Relay(runtime), Relay(other)
    async with blocking.receiver as receiver:
        await subscribe(client, receiver, max_in_flight=4, timeout_s=60)
        sent = await publish(client, *(order(number) for number in range(20)))
        await turn_until(first, runtime, lambda: db.fetchval("select count(*) = 5 from receipt"))
        await turn_until(first, runtime, lambda: len(receiver.calls) == 9)
        kill(first)
        blocking.answered.set()
        await step(second, other)
        assert not second.streams
        other.clock.offset_s += 11
        await turn_until(second, other, lambda: db.fetchval("select count(*) = 20 from receipt"))
        await second.drain(other)
    received = offsets(receiver)
    assert set(received) == set(sent)
    twice = {offset for offset in received if received.count(offset) > 1}
    assert twice == set(received[5:9])
    assert len(received) == 24


async def test_a_stale_holder_settles_nothing(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    blocking = BlockingReceiver()
    first, second = Relay(runtime), Relay(other)
    async with blocking.receiver as receiver:
        await subscribe(client, receiver, timeout_s=60, retry=[10])
        await publish(client, order(1))
        await turn_until(first, runtime, lambda: receiver.calls)
        other.clock.offset_s += 11
        await turn_until(second, other, lambda: len(receiver.calls) == 2)
        [stale], [fresh] = first.streams.values(), second.streams.values()
        assert fresh.lease.epoch == stale.lease.epoch + 1
        blocking.answered.set()
        await stale.sender.wait_idle()
        async with runtime.database.connection() as connection:
            await first.settle(runtime, connection, runtime.clock.now())
        assert stale.lost
        assert await db.fetchval("select count(*) from receipt") == 0
        await turn_until(second, other, lambda: db.fetchval("select count(*) = 1 from receipt"))
        await first.drain(runtime)
        await second.drain(other)
    assert await db.fetchval("select attempts from receipt") == 1


async def test_a_lag_is_shown_by_the_holder_alone(client: httpx.AsyncClient, runtime: Runtime, other: Runtime) -> None:
    blocking = BlockingReceiver()
    first, second = Relay(runtime), Relay(other)
    async with blocking.receiver as receiver:
        await subscribe(client, receiver, timeout_s=60)
        await publish(client, order(1))
        await turn_until(first, runtime, lambda: len(receiver.calls) == 1)
        runtime.clock.offset_s += 2
        await step(first, runtime)
        assert list(lags(runtime)) == ["mailer"]
        other.clock.offset_s = runtime.clock.offset_s = 3600
        await turn_until(second, other, lambda: list(lags(other)) == ["mailer"])
        # The first relay learns that another one holds its lease.
        await turn_until(first, runtime, lambda: not first.streams)
        runtime.clock.offset_s += 2
        await step(first, runtime)
        blocking.answered.set()
        await second.drain(other)
    assert lags(runtime) == {}
    assert (await client.delete("/subscriptions/mailer")).status_code == 204
    assert list(lags(other)) == ["mailer"]
    await step(second, other)
    other.clock.offset_s += 2
    await step(second, other)
    assert lags(other) == {}


async def test_the_lag_of_a_paused_subscription_may_be_shown_by_another_process(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime
) -> None:
    relay, watch, idle = Relay(runtime), Routing(), Routing()
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await turn_until(relay, runtime, lambda: list(lags(runtime)) == ["mailer"])
        await client.post("/subscriptions/mailer/pause")
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: not relay.streams)
        await publish(client, order(1), order(2))
        await watch.step(other, other.clock.now())
        await step(relay, runtime)
        assert (lags(runtime), lags(other)) == ({}, {"mailer": 2})
        # The process that shows inactive subscriptions may change as well.
        later = other.clock.now() + timedelta(minutes=1)
        await idle.step(runtime, later)
        assert lags(runtime) == {"mailer": 2}
        await watch.step(other, later)
        assert lags(other) == {}
        # In one process, neither loop removes the lag that the other shows.
        await client.post("/subscriptions/mailer/resume")
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 2)
        runtime.clock.offset_s += 2
        await step(relay, runtime)
        await idle.step(runtime, later)
        assert list(lags(runtime)) == ["mailer"]
        await relay.drain(runtime)


async def test_nothing_is_sent_after_the_lease_has_expired(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection
) -> None:
    blocking = BlockingReceiver()
    relay = Relay(runtime)
    async with blocking.receiver as receiver:
        await subscribe(client, receiver, max_in_flight=1, timeout_s=60)
        await publish(client, order(1), order(2))
        await turn_until(relay, runtime, lambda: receiver.calls)
        # As after SIGSTOP: the clock is past the lease before anything was renewed.
        runtime.clock.offset_s += 11
        blocking.answered.set()
        [stream] = relay.streams.values()
        await stream.sender.wait_idle()
        async with runtime.database.connection() as connection:
            await relay.settle(runtime, connection, runtime.clock.now())
        assert len(receiver.calls) == 1
        # No other worker took the lease, so it is renewed and delivery continues.
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from receipt"))
        await relay.drain(runtime)


async def test_a_stale_claim_of_a_retry_settles_nothing(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    first, second = Relay(runtime), Relay(other)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, retry=[10, 10, 10], timeout_s=1)
        await publish(client, order(1))
        await turn_until(first, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        blocking = BlockingReceiver()
        receiver.answer = blocking._answer
        blocking.receiver = receiver
        runtime.clock.offset_s += 12
        await turn_until(first, runtime, lambda: len(receiver.calls) == 2)
        leased = await db.fetchrow("select leased_until, lease_epoch from delivery_retry")
        assert leased["lease_epoch"] == 1
        kill(first)
        receiver.answer, receiver.status = None, 200
        other.clock.offset_s += 40
        await turn_until(second, other, lambda: db.fetchval("select count(*) = 1 from receipt"))
        blocking.answered.set()
        await second.drain(other)
    assert await db.fetchval("select attempts from receipt") == 2
    assert await db.fetchval("select count(*) from delivery_retry") == 0


def unreadable(subscription: Subscription) -> Destination:
    """Stand in for `Assignments._destination`, as with a wrong sealing key or without the library of a broker."""
    raise NotInstalled("kafka")


async def test_what_a_worker_cannot_open_is_taken_by_another_beyond_its_share(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong sealing key at one worker, or without the library of a broker."""
    first, second = Relay(runtime), Relay(other)
    monkeypatch.setattr(second._assignments, "_destination", unreadable)

    async def turns(count: int) -> None:
        for _ in range(count):
            for process, relay in ((other, second), (runtime, first)):
                process.clock.offset_s += 3.5
                await step(relay, process)

    async with Responder() as receiver:
        for number in range(4):
            await subscribe(client, receiver, f"mailer-{number}")
        await turns(1)
        [sent] = await publish(client, order(1))
        await turn_until(first, runtime, lambda: len(receiver.calls) == 2)
        # Half of them are the other worker's share, for as long as it may still take them.
        await turns(7)
        assert (len(first.streams), len(receiver.calls)) == (2, 2)
        await turns(4)
        await turn_until(first, runtime, lambda: len(receiver.calls) == 4)
        assert offsets(receiver) == [sent] * 4
        assert len(first._assignments._beyond) == 2
        # They stay until the number of workers changes.
        await turns(4)
        assert len(first.streams) == 4
        await second.drain(other)
        runtime.clock.offset_s += 12
        await step(first, runtime)
        assert not first._assignments._beyond
        assert len(first.streams) == 4


async def test_a_worker_that_replaces_another_gets_what_was_taken_beyond_the_share(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many workers as before, so their number says nothing."""
    first, second = Relay(runtime), Relay(other)
    monkeypatch.setattr(second._assignments, "_destination", unreadable)
    async with Responder() as receiver:
        for number in range(4):
            await subscribe(client, receiver, f"mailer-{number}")
        for _ in range(14):
            for process, relay in ((other, second), (runtime, first)):
                process.clock.offset_s += 3.5
                await step(relay, process)
        assert len(first.streams) == 4
        await second.drain(other)
        other.owner = "replacement"
        replacement = Relay(other)
        for _ in range(4):
            for process, relay in ((other, replacement), (runtime, first)):
                process.clock.offset_s += 3.5
                await step(relay, process)
        assert [len(relay.streams) for relay in (first, replacement)] == [2, 2]
        await replacement.drain(other)
        await first.drain(runtime)


async def test_two_relays_share_the_subscriptions(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    first, second = Relay(runtime), Relay(other)
    async with Responder() as receiver:
        for number in range(5):
            await subscribe(client, receiver, f"mailer-{number}")
        await step(first, runtime)
        assert len(first.streams) == 5

        async def turn_both() -> None:
            for relay, process in ((first, runtime), (second, other)):
                process.clock.offset_s += 3.5
                await step(relay, process)

        async with asyncio.timeout(15):
            while not (len(first.streams) == 3 and len(second.streams) == 2):
                await turn_both()
        assert not set(first.streams) & set(second.streams)
        [sent] = await publish(client, order(1))
        async with asyncio.timeout(15):
            while await db.fetchval("select count(*) from receipt") < 5:
                await step(first, runtime)
                await step(second, other)
        await first.drain(runtime)
        await second.drain(other)
    assert offsets(receiver) == [sent] * 5


async def test_a_drain_settles_what_is_in_flight_and_releases_the_leases(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    blocking = BlockingReceiver()
    first, second = Relay(runtime), Relay(other)
    async with blocking.receiver as receiver:
        await subscribe(client, receiver, max_in_flight=2, timeout_s=60)
        sent = await publish(client, *(order(number) for number in range(6)))
        await turn_until(first, runtime, lambda: len(receiver.calls) == 2)
        draining = asyncio.create_task(first.drain(runtime))
        await asyncio.wait([draining], timeout=0.05)
        assert not draining.done()
        blocking.answered.set()
        await draining
        assert len(receiver.calls) == 2
        assert await db.fetchval("select count(*) from receipt") == 2
        assert await db.fetchval('select "offset" from checkpoint') == sent[1]
        # The other relay takes over at once, without a wait for the leases to expire.
        await turn_until(second, other, lambda: db.fetchval("select count(*) = 6 from receipt"))
        await second.drain(other)
    assert sorted(offsets(receiver)) == sent
    # The offsets of the two clocks differ by milliseconds, and `other` released last.
    assert await db.fetchval("select count(*) from lease where expires_at > $1", other.clock.now()) == 0


async def test_a_drain_releases_claimed_retries(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection
) -> None:
    relay = Relay(runtime)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, max_in_flight=1, retry=[10, 10])
        await publish(client, order(1), order(2))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from delivery_retry"))
        [stream] = relay.streams.values()
        # With an expired lease, the claimed retry is not sent.
        stream.sender.lease_until -= timedelta(seconds=60)
        runtime.clock.offset_s += 12
        async with runtime.database.connection() as connection:
            await relay._claim_retries(runtime, connection, runtime.clock.now())
        assert await db.fetchval("select count(*) from delivery_retry where leased_until is not null") == 1
        await relay.drain(runtime)
    assert await db.fetchval("select count(*) from delivery_retry where leased_until is not null") == 0
    assert await db.fetchval("select sum(attempts) from delivery_retry") == 2
    assert len(receiver.calls) == 2


async def test_a_commit_in_another_process_wakes_the_relay(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection, group: str
) -> None:
    arrived = asyncio.Event()

    async def note(call: Call) -> web.Response:
        arrived.set()
        return web.Response()

    async with Responder(note) as receiver:
        await subscribe(client, receiver)
        relay = Relay(other)
        await step(relay, other)
        await other.wake_ups.listen()
        other.wake_ups.relay.clear()
        stopping = asyncio.Event()
        tasks = [
            asyncio.create_task(run(loop, process, stopping))
            for loop, process in (
                (Loop("tell", notify, NEVER_S, runtime.wake_ups.notify_due), runtime),
                (Loop("relay", relay.step, NEVER_S, other.wake_ups.relay, relay.drain), other),
            )
        ]
        async with asyncio.timeout(10):
            while "relay" not in other.heartbeats:
                await asyncio.sleep(0)
            await publish(client, order(1))
            await arrived.wait()
        stopping.set()
        await asyncio.gather(*tasks)
        assert await db.fetchval("select count(*) from receipt") == 1


async def test_a_commit_here_wakes_the_relay_without_notify(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    arrived = asyncio.Event()

    async def note(call: Call) -> web.Response:
        arrived.set()
        return web.Response()

    async with Responder(note) as receiver:
        await subscribe(client, receiver)
        relay = Relay(runtime)
        await step(relay, runtime)
        stopping = asyncio.Event()
        loop = Loop("relay", relay.step, NEVER_S, runtime.wake_ups.relay, relay.drain)
        task = asyncio.create_task(run(loop, runtime, stopping))
        async with asyncio.timeout(10):
            await publish(client, order(1))
            await arrived.wait()
        stopping.set()
        await task


async def test_rolled_back_messages_wake_no_relay(client: httpx.AsyncClient, runtime: Runtime, group: str) -> None:
    half = await client.post("/half", json={"producer_group": "shop", "messages": [order(1)]})
    end = {"transaction_id": half.json()["transaction_id"], "producer_group": "shop"}
    await client.post("/end", json={**end, "verdict": "rollback"})
    assert not runtime.wake_ups.relay.is_set()
    await client.post("/end", json={**end, "verdict": "commit"})
    assert not runtime.wake_ups.relay.is_set()
    await publish(client, order(2))
    assert runtime.wake_ups.relay.is_set()


async def test_notifies_are_coalesced_and_a_lost_listener_reconnects(
    runtime: Runtime, other: Runtime, db: Connection
) -> None:
    await other.wake_ups.listen()
    other.wake_ups.relay.clear()
    for _ in range(5):
        runtime.wake_ups.published()
    assert await runtime.wake_ups.notify()
    assert not await runtime.wake_ups.notify()
    async with asyncio.timeout(10):
        await other.wake_ups.relay.wait()
    other.wake_ups.relay.clear()
    await db.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid() and query = 'select 1'"
    )
    async with asyncio.timeout(10):
        while not other.wake_ups.relay.is_set():
            with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
                await other.wake_ups.listen()
            await asyncio.sleep(0.01)
    # Connected again, the relay looks for what it missed, and the next NOTIFY arrives.
    other.wake_ups.relay.clear()
    runtime.wake_ups.published()
    await runtime.wake_ups.notify()
    async with asyncio.timeout(10):
        await other.wake_ups.relay.wait()
