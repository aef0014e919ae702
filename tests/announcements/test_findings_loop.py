"""Findings are announced on `halfnote.finding`: each once, with day and kind, with any number of replicas and kills."""

import asyncio
import json
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import httpx
import pytest

from app.announcements import FINDING
from app.database.connection import Connection, connect
from app.loops import announce_findings, announce_held_back
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.proof.findings import EXAMPLES, take_unannounced
from app.store.relay.announcements import ANNOUNCE_EVERY_S
from tests.announcements.test_messages import bodies
from tests.support.check_responder import Responder
from tests.support.processes import ROOT
from tests.support.proof_runs import DAY, ID, find, find_many, reopen, resolve
from tests.support.relay_stepping import turn_until

AFTER = timedelta(seconds=ANNOUNCE_EVERY_S + 1)
BEFORE = DAY - timedelta(days=1)


async def announced(db: Connection) -> list[tuple[str, str, int, int]]:
    """Return day, kind, count and held_back of each message, in the log's order."""
    return [(one["day"], one["kind"], one["count"], one["held_back"]) for one in await bodies(db)]


async def unannounced(db: Connection) -> int:
    count: int = await db.fetchval("select count(*) from finding where announced_at is null and resolved_at is null")
    return count


async def test_the_body_of_a_finding_message(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find(db, "parked", ID, transaction_id=ID, first_run=3, last_run=4)
    await find(db, "parked", f"{ID[:-1]}1", first_run=4, last_run=4)
    assert (await announce_findings.step(runtime, now)).done == 2
    [body] = await bodies(db)
    assert body == {
        "type": FINDING,
        "at": now.isoformat().replace("+00:00", "Z"),
        "day": str(DAY),
        "kind": "parked",
        "count": 2,
        "examples": [ID, f"{ID[:-1]}1"],
        "first_run": 3,
        "last_run": 4,
        "docs": "/findings/kinds/parked",
        "held_back": 1,
    }
    documented = (ROOT / "docs" / "operational-messages.md").read_text().partition(f"### `{FINDING}`")[2]
    assert json.loads(documented.split("```json")[1].split("```")[0]).keys() == body.keys()
    row = await db.fetchrow("select topic, key from outbox")
    assert row is not None
    assert tuple(row) == (FINDING, "parked")


async def test_one_message_a_day_and_kind_and_each_finding_once(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find_many(db, "parked", 25)
    await find_many(db, "unrouted", 2)
    await find_many(db, "parked", 1, BEFORE)
    await find(db, "undelivered", "healed")
    await resolve(db, "healed")
    assert (await announce_findings.step(runtime, now)).done == 28
    day, before = str(DAY), str(BEFORE)
    assert await announced(db) == [(day, "parked", 25, 24), (day, "unrouted", 2, 1), (before, "parked", 1, 0)]
    first = (await bodies(db))[0]
    assert first["examples"] == [f"parked-{n}" for n in range(1, EXAMPLES + 1)]
    assert await unannounced(db) == 0
    again = await announce_findings.step(runtime, now + AFTER)
    assert (again.done, again.more) == (0, False)
    await announce_held_back.step(runtime, now + AFTER)
    assert len(await bodies(db)) == 3


async def test_many_findings_are_announced_in_steps_and_those_held_back_later(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find_many(db, "parked", 25)
    while (await announce_findings.step(runtime, now, at_once=10)).more:
        pass
    assert await unannounced(db) == 0
    # The first message is sent at once; of the fifteen later findings the newest, after the interval of the limit.
    assert await announced(db) == [(str(DAY), "parked", 25, 9)]
    await announce_held_back.step(runtime, now + AFTER)
    assert await announced(db) == [(str(DAY), "parked", 25, 9), (str(DAY), "parked", 25, 14)]
    assert (await bodies(db))[1]["examples"][-1] == "parked-25"


async def test_findings_about_operational_messages_are_not_announced(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find(db, "undelivered", f"{ID}-0:1", detail='{"topic": "halfnote.finding"}')
    assert (await announce_findings.step(runtime, now)).done == 0
    assert (await unannounced(db), await announced(db)) == (0, [])
    await find(db, "undelivered", f"{ID}-0:2", detail='{"topic": "halfnotes"}')
    assert (await announce_findings.step(runtime, now)).done == 1
    assert [one["examples"] for one in await bodies(db)] == [[f"{ID}-0:2"]]


async def test_a_finding_that_returns_is_announced_again(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find(db, "parked", ID)
    await announce_findings.step(runtime, now)
    await resolve(db, ID)
    assert (await announce_findings.step(runtime, now + AFTER)).done == 0
    await reopen(db, ID)
    assert (await announce_findings.step(runtime, now + 2 * AFTER)).done == 1
    assert [(one["first_run"], one["last_run"]) for one in await bodies(db)] == [(1, 1), (1, 3)]


async def test_a_kill_during_a_step_leaves_no_partial_work(runtime: Runtime, db: Connection, dsn: str) -> None:
    now = runtime.clock.now()
    await find_many(db, "parked", 3)
    killed = await connect(dsn)
    transaction = killed.transaction()
    await transaction.start()
    assert [one.new for one in await take_unannounced(killed, now)] == [3]
    # Another replica skips the rows that this one has locked, and does not wait.
    assert (await announce_findings.step(runtime, now)).done == 0
    await db.execute("select pg_terminate_backend($1)", killed.get_server_pid())
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)):
        await killed.execute("select 1")
    # `pg_terminate_backend` returns before the session has ended.
    async with asyncio.timeout(30):
        while (await announce_findings.step(runtime, now)).done == 0:
            await asyncio.sleep(0.01)
    assert await announced(db) == [(str(DAY), "parked", 3, 2)]


async def test_a_finding_that_could_not_be_announced_is_not_marked(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find_many(db, "parked", 3)
    await db.execute("alter table half add constraint trap check (topic <> 'halfnote.finding')")
    with pytest.raises(asyncpg.CheckViolationError):
        await announce_findings.step(runtime, now)
    assert await unannounced(db) == 3
    await db.execute("alter table half drop constraint trap")
    assert (await announce_findings.step(runtime, now)).done == 3


async def test_concurrent_replicas_announce_each_finding_once(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    for day in range(4):
        await find_many(db, "parked", 50, DAY - timedelta(days=day))
    steps = await asyncio.gather(*(announce_findings.step(runtime, now) for _ in range(6)))
    assert sum(step.done for step in steps) == 200
    await announce_held_back.step(runtime, now + AFTER)
    # In any division of the rows, each is counted in one message.
    counts: dict[str, int] = {}
    for day, _, count, held_back in await announced(db):
        assert count == 50
        counts[day] = counts.get(day, 0) + 1 + held_back
    assert counts == {str(DAY - timedelta(days=day)): 50 for day in range(4)}


async def test_a_day_without_partitions_delays_the_message(runtime: Runtime, db: Connection) -> None:
    now = runtime.clock.now()
    await find_many(db, "parked", 2)
    await db.execute("update day set state = 'archiving'")
    assert (await announce_findings.step(runtime, now)).done == 2
    assert await announced(db) == []
    await db.execute("update day set state = 'open'")
    await announce_held_back.step(runtime, later(now))
    assert await announced(db) == [(str(DAY), "parked", 2, 1)]


def later(now: datetime) -> datetime:
    return now + AFTER


async def test_a_webhook_gets_the_finding(runtime: Runtime, client: httpx.AsyncClient, db: Connection) -> None:
    async with Responder() as receiver:
        subscription: dict[str, Any] = {
            "topics": ["halfnote.*"],
            "destination": {"type": "webhook", "url": receiver.url},
        }
        assert (await client.put("/subscriptions/people", json=subscription)).status_code == 201
        await find_many(db, "content_differs", 2)
        relay = Relay(runtime)
        await announce_findings.step(runtime, runtime.clock.now())
        await turn_until(relay, runtime, lambda: len(receiver.calls) == 1)
        await relay.drain(runtime)
        [call] = receiver.calls
        assert call.headers["ce-type"] == FINDING
        assert json.loads(call.body)["kind"] == "content_differs"
