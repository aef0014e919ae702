"""The order of a key after a lost lease, if later messages of it are in delivery_retry and earlier ones are not."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from app.config import Settings
from app.database.connection import Connection
from app.lifecycle.startup import assemble
from app.relay import window
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.relay.test_deferred_bodies import HOT, MEMORY, Held, fill
from tests.relay.test_ordering import by_key, keyed, receipts
from tests.support.check_responder import Responder
from tests.support.relay_stepping import publish, subscribe, turn_until

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
