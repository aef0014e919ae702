"""The order of a key after a lost lease, if later messages of it are in delivery_retry and earlier ones are not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import httpx
import pytest
from aiohttp import web

from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import assemble
from app.relay import key_order, window
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.relay.test_deferred_bodies import HOT, MEMORY, Held, fill
from tests.relay.test_ordering import by_key, keyed, receipts
from tests.support.check_responder import Call, Responder
from tests.support.examples import examples
from tests.support.relay_stepping import publish, step, subscribe, turn_until

LATE = 5


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "WINDOW_LEAST", MEMORY // window.MEMORY_TIMES)


@pytest.fixture
async def other(settings: Settings, dsn: str, group: str) -> AsyncIterator[Runtime]:
    """A second process over the same database."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings, dsn, stack)


async def take_over(former: Runtime, holder: Runtime) -> Relay:
    """Return the relay of a process that takes over the shards of a former one, whose relay stands still."""
    holder.clock.offset_s = former.clock.offset_s + 11
    relay = Relay(holder)
    await turn_until(relay, holder, lambda: relay.streams)
    return relay


def stored(db: Connection, count: int) -> object:
    return lambda: db.fetchval("select count(*) = $1 from delivery_retry where due_at <= now()", count)


@pytest.mark.parametrize("fields", [{}, {"on_dead": "hold"}], ids=["continue", "hold"])
@pytest.mark.parametrize("loses", ["lease", "memory"])
async def test_a_backlog_in_memory_comes_before_what_was_stored_behind_a_delayed_message(
    client: httpx.AsyncClient,
    runtime: Runtime,
    other: Runtime,
    db: Connection,
    fields: dict[str, Any],
    loses: str,
) -> None:
    answer, former = Held(), Relay(runtime)
    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", max_in_flight=4, timeout_s=60, **fields)
        [delayed] = await publish(client, keyed("hot", 0, deliver_after_s=60))
        await turn_until(former, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        sent = await fill(client, ["hot"] * HOT, 1)
        [stream] = former.streams.values()
        await turn_until(former, runtime, lambda: stream.position == sent[-1])
        runtime.clock.offset_s += 61
        await turn_until(former, runtime, lambda: stream.outcomes.unsettled_retries == 1)
        sent += await fill(client, ["hot"] * LATE, 1 + HOT)
        await turn_until(former, runtime, stored(db, LATE))
        if loses == "lease":
            holder, process = await take_over(runtime, other), other
        else:
            former.forget()
            holder, process = former, runtime
        answer.may_answer.set()
        await turn_until(holder, process, receipts(db, 1 + HOT + LATE), within_s=60)
        await former.drain(runtime)
        await holder.drain(process)
    received = by_key(receiver.calls)["hot"]
    assert [offset for offset in received if offset != delayed] == [sent[0], *sent]
    assert received.count(delayed) == 1


async def test_a_backlog_in_memory_comes_before_what_was_stored_behind_a_redelivered_message(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection
) -> None:
    answer, former = Held(), Relay(runtime)
    async with Responder(status=500) as receiver:
        await subscribe(client, receiver, ordered="key", max_in_flight=4, timeout_s=60, retry=[])
        [dead] = await publish(client, keyed("hot", 0))
        await turn_until(former, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        receiver.answer = answer
        sent = await fill(client, ["hot"] * HOT, 1)
        [stream] = former.streams.values()
        await turn_until(former, runtime, lambda: stream.position == sent[-1])
        wanted = {"filter": {"subscription": "mailer"}, "reason": "again", "dry_run": False}
        assert (await client.post("/dead-letters/redeliver", json=wanted)).status_code == 200
        await turn_until(former, runtime, lambda: stream.outcomes.unsettled_retries == 1)
        sent += await fill(client, ["hot"] * LATE, 1 + HOT)
        await turn_until(former, runtime, stored(db, 1 + LATE))
        holder = await take_over(runtime, other)
        answer.may_answer.set()
        await turn_until(holder, other, receipts(db, 1 + len(sent)), within_s=60)
        await former.drain(runtime)
        await holder.drain(other)
    received = by_key(receiver.calls)["hot"]
    assert [offset for offset in received if offset != dead] == [sent[0], *sent]
    assert received.count(dead) == 2


async def test_a_full_shard_reads_on_to_a_delayed_message_that_its_former_holder_stored(
    client: httpx.AsyncClient, runtime: Runtime, other: Runtime, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead key has so many rows that nothing more is read, and the row of another key is not due at the start."""
    may_answer, former = asyncio.Event(), Relay(runtime)

    async def answer(call: Call) -> web.Response:
        if call.headers["ce-subject"] == "slow":
            await may_answer.wait()
        return web.Response(status=500 if call.headers["ce-subject"] == "dead" else 200)

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold", retry=[], timeout_s=60)
        [dead, *_, last] = await publish(client, *(keyed("dead") for _ in range(4)))
        await turn_until(former, runtime, stored(db, 3))
        runtime.clock.offset_s += 2
        await turn_until(former, runtime, lambda: db.fetchval('select "offset" >= $1 from checkpoint', last))
        # What is in flight keeps the checkpoint before the delayed message.
        slow, delayed = await publish(client, keyed("slow"), keyed("late", deliver_after_s=90))
        await turn_until(former, runtime, lambda: db.fetchval("select count(*) = 4 from delivery_retry"))
        monkeypatch.setattr(key_order, "HELD_MOST", 3)
        holder = await take_over(runtime, other)
        [stream] = holder.streams.values()
        may_answer.set()
        assert stream.queue.full
        assert stream.position < slow
        other.clock.offset_s += 91
        await turn_until(holder, other, receipts(db, 2))
        assert stream.queue.full
        await former.drain(runtime)
        await holder.drain(other)
    assert by_key(receiver.calls) == {"dead": [dead], "slow": [slow, slow], "late": [delayed]}


class Flaky:
    """Answers late and fails messages at random, until it is `steady`."""

    def __init__(self, random: Random) -> None:
        self.random, self.steady = random, False

    async def __call__(self, call: Call) -> web.Response:
        if self.steady:
            return web.Response()
        # With a slow answer the messages behind it wait in memory, and a holder dies before it.
        await asyncio.sleep(self.random.choice([0, 0.01, 1]))
        return web.Response(status=self.random.choice([500] + [200] * 20))


async def redeliver_all(client: httpx.AsyncClient) -> None:
    wanted = {"filter": {"subscription": "mailer"}, "reason": "again", "dry_run": False}
    assert (await client.post("/dead-letters/redeliver", json=wanted)).status_code == 200


@pytest.mark.parametrize("on_dead", ["release", "hold"])
@pytest.mark.parametrize("seed", range(examples(40)))
async def test_the_order_of_keys_holds_over_delays_redelivery_and_lost_leases(
    client: httpx.AsyncClient,
    runtime: Runtime,
    other: Runtime,
    db: Connection,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    on_dead: str,
) -> None:
    """Few messages have room in memory, and a holder of the lease dies at any time."""
    monkeypatch.setattr(window, "WINDOW_LEAST", 1)
    monkeypatch.setattr(window, "MEMORY_TIMES", 2)
    random = Random(seed)
    answer = Flaky(random)
    sent: dict[str, list[int]] = {"hot": [], "warm": [], "cold": []}
    delayed: set[int] = set()

    async def publish_some(count: int) -> None:
        keys = random.choices(["hot", "warm", "cold"], [6, 2, 1], k=count)
        # The database dates them, whose clock stands behind those of the processes.
        ahead_s = int(runtime.clock.offset_s)
        delays = [ahead_s + random.choice([2, 3]) if random.random() < 0.15 else None for _ in keys]
        messages = [
            keyed(key) | ({} if delay is None else {"deliver_after_s": delay})
            for key, delay in zip(keys, delays, strict=True)
        ]
        made = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
        assert made.status_code == 201
        for key, delay, one in zip(keys, delays, made.json()["messages"], strict=True):
            sent[key].append(one["offset"])
            if delay is not None:
                delayed.add(one["offset"])

    def pass_time(seconds: float) -> None:
        runtime.clock.offset_s += seconds
        other.clock.offset_s += seconds

    async def settled() -> bool:
        left = "select (select count(*) from delivery_retry) + (select count(*) from dead_letter)"
        done = await db.fetchval("select count(*) from receipt where outcome = 'delivered'")
        return bool(done == sum(map(len, sent.values())) and not await db.fetchval(left))

    async with Responder(answer) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead=on_dead, max_in_flight=2, retry=[0.01])
        for _ in range(4):
            process = random.choice([runtime, other])
            relay = Relay(process)
            for _ in range(random.randint(5, 20)):
                await publish_some(random.randint(1, 12))
                await step(relay, process)
                if random.random() < 0.3:
                    await redeliver_all(client)
                if random.random() < 0.15:
                    relay.forget()
                pass_time(random.choice([0, 0.6, 1.2]))
            for stream in relay.streams.values():
                stream.drop()
            await asyncio.gather(*(stream.close_destination() for stream in relay.streams.values()))
            pass_time(11)
        answer.steady, last = True, Relay(runtime)
        async with asyncio.timeout(120):
            while not await settled():
                await redeliver_all(client)
                pass_time(1)
                await step(last, runtime)
        await last.drain(runtime)
    released = {row[0] for row in await db.fetch('select "offset" from redelivery')} if on_dead == "release" else set()
    for key, offsets in sent.items():
        received = by_key(receiver.calls)[key]
        assert set(received) == set(offsets)
        in_order = [offset for offset in received if offset not in delayed | released]
        assert in_order == sorted(in_order)
