"""Operational messages: written with their cause or not at all, in the log's order, at most at their rate limit."""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from app.announcements import (
    DEAD,
    PARKED,
    UndecidedTransaction,
    breaker_closed,
    breaker_opened,
    dead_letter,
    disabled,
    expiring,
    findings,
    parked,
    rolled_back,
)
from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection, connect
from app.ids import uuid7
from app.loops import announce_held_back
from app.relay.loop import Relay
from app.relay.unrouted import Routing
from app.retention import day_holders
from app.retention import loop as retention_loop
from app.retention.loop import ANNOUNCED_KEPT, clear_leftovers
from app.runtime.state import Runtime
from app.store.coordinator.halves import insert_halves
from app.store.coordinator.ops import End, record_ends
from app.store.proof.findings import AnnouncedFindings
from app.store.relay import announcements as store
from app.store.relay.announcements import ANNOUNCE_EVERY_S, AT_ONCE, Announcement, announce, announce_withheld, forget
from app.store.retention import days
from app.store.subscriptions.subscriptions import one as subscription_of
from app.verdicts import Source, Verdict
from tests.conftest import client_of
from tests.coordinator.test_races import half_with, store_halves, until_waiting
from tests.coordinator.test_statement_plans import both_plans, full
from tests.support.check_responder import Responder
from tests.support.days import go_to, long_ago
from tests.support.explain import big, scans
from tests.support.processes import ROOT
from tests.support.relay_stepping import order, publish, subscribe, turn_until

__all__ = ["full"]

AFTER = timedelta(seconds=ANNOUNCE_EVERY_S)


def announcement(number: int, at: datetime, cause: str = "shop", topic: str = PARKED) -> Announcement:
    return Announcement(topic, cause, cause, {"type": topic, "at": at, "number": number})


async def announce_now(db: Connection, announcements: Sequence[Announcement], now: datetime) -> int:
    async with db.transaction():
        return await announce(db, announcements, now)


async def announce_held_back_now(db: Connection, now: datetime) -> int:
    async with db.transaction():
        return await announce_withheld(db, now)


async def bodies(db: Connection) -> list[dict[str, Any]]:
    """Return the bodies of operational messages, in the log's order."""
    rows = await db.fetch(
        """select h.body from outbox o join half h using (transaction_id, position)
        where h.producer_group = 'halfnote' order by o."offset" """
    )
    return [json.loads(row["body"]) for row in rows]


async def announced(db: Connection) -> list[tuple[int, int]]:
    return [(body["number"], body["held_back"]) for body in await bodies(db)]


async def test_an_operational_message_is_a_message_like_any_other(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    assert await announce_now(db, [announcement(1, now)], now) == 1
    transaction_id = await db.fetchval("select transaction_id from outbox")
    async with client_of(runtime) as client:
        transaction = (await client.get(f"/transactions/{transaction_id}")).json()
        page = (await client.get("/transactions", params={"producer_group": "halfnote"})).json()
        message = (await client.get(f"/messages/{transaction_id}-0")).json()
        topics = (await client.get("/topics")).json()["items"]
    assert (transaction["state"], transaction["producer_group"]) == ("committed", "halfnote")
    assert transaction["verdict"]["source"] == "policy"
    assert [entry["what"] for entry in transaction["timeline"]] == ["born", "verdict", "published"]
    assert [item["transaction_id"] for item in page["items"]] == [str(transaction_id)]
    assert message["body"] == {
        "type": PARKED,
        "at": now.isoformat().replace("+00:00", "Z"),
        "number": 1,
        "held_back": 0,
    }
    assert [topic["topic"] for topic in topics] == [PARKED]


async def test_it_is_written_with_its_cause_or_not_at_all(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    transaction = db.transaction()
    await transaction.start()
    assert await announce(db, [announcement(1, now)], now) == 1
    await transaction.rollback()
    for table in ("half", "op", "outbox", "announced", "topic"):
        assert await db.fetchval(f"select count(*) from {table}") == 0
    # The interval of the limit did not begin either.
    assert await announce_now(db, [announcement(2, now)], now) == 1
    assert await announced(db) == [(2, 0)]


async def test_a_cause_is_announced_at_once_and_then_at_its_limit(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    assert await announce_now(db, [announcement(1, now), announcement(2, now), announcement(3, now, "bank")], now) == 2
    assert await announce_now(db, [announcement(4, now)], now + AFTER / 2) == 0
    assert (
        await announce_now(
            db, [announcement(5, now), announcement(6, now, topic="halfnote.delivery.dead")], now + AFTER / 2
        )
        == 1
    )
    assert await announce_now(db, [announcement(7, now)], now + AFTER) == 1
    assert await announced(db) == [(1, 1), (3, 0), (6, 0), (7, 2)]


async def test_the_newest_held_back_message_is_announced_after_the_interval(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    for number in range(5):
        await announce_now(db, [announcement(number, now + timedelta(seconds=number))], now)
    assert await announce_held_back_now(db, now + AFTER / 2) == 0
    assert await announce_held_back_now(db, now + AFTER) == 1
    assert await announced(db) == [(0, 0), (4, 3)]
    assert await announce_held_back_now(db, now + 3 * AFTER) == 0
    # The follow-up counts for the limit as well.
    assert await announce_now(db, [announcement(5, now)], now + AFTER * 1.5) == 0
    assert await announce_now(db, [announcement(6, now)], now + AFTER * 2) == 1
    assert await announced(db) == [(0, 0), (4, 3), (6, 1)]


async def test_a_message_that_stands_for_many_counts_as_many(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    await announce_now(db, [replace(announcement(1, now), stands_for=1000), announcement(2, now)], now)
    await announce_now(db, [replace(announcement(3, now), stands_for=10)], now)
    await announce_held_back_now(db, now + AFTER)
    assert await announced(db) == [(1, 1000), (3, 9)]


async def test_dead_letters_of_a_removed_day_are_announced(db: Connection, runtime: Runtime, group: str) -> None:
    old_time, now = long_ago(3), long_ago(0)
    runtime.settings = runtime.settings.model_copy(update={"retention_s": 86_400, "max_retention_s": 86_400})
    async with client_of(runtime) as client, Responder() as receiver:
        await go_to(runtime, db, old_time)
        await subscribe(client, receiver, "billing", topics=["order", "halfnote.*"])
        await subscribe(client, receiver, "people", topics=["halfnote.*"])
        await announce_now(db, [announcement(0, old_time)], old_time)
        offsets = await publish(client, order(1), order(2))
        await go_to(runtime, db, now)
        await retention_loop.step(runtime, now)
    assert await db.fetchval("select count(*) from dead_letter where reason = 'day_left'") == 4
    newest = await db.fetchrow('select * from dead_letter where "offset" = $1', offsets[1])
    assert newest is not None
    [body] = await bodies(db)
    assert (body["type"], body["subscription"], body["held_back"]) == (DEAD, "billing", 1)
    assert (body["reason"], body["attempts"], body["topic"], body["key"]) == ("day_left", 0, "order", "order-2")
    assert body["message_id"] == f"{newest['transaction_id']}-0"
    assert runtime.wake_ups.relay.is_set()


async def test_a_step_announces_held_back_messages_and_wakes_the_relay(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    await announce_now(db, [announcement(1, now)], now - AFTER)
    assert (await announce_held_back.step(runtime, now)).done == 0
    assert not runtime.wake_ups.relay.is_set()
    await announce_now(db, [announcement(2, now)], now - AFTER / 2)
    assert (await announce_held_back.step(runtime, now + AFTER)).done == 1
    assert runtime.wake_ups.relay.is_set()
    assert await announced(db) == [(1, 0), (2, 0)]


async def test_more_held_back_causes_than_one_step_announces(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    several = [announcement(number, now, f"group-{number}") for number in range(AT_ONCE + 3)]
    assert await announce_now(db, several, now) == AT_ONCE + 3
    assert await announce_now(db, several, now) == 0
    result = await announce_held_back.step(runtime, now + AFTER)
    assert (result.done, result.more) == (AT_ONCE, True)
    assert (await announce_held_back.step(runtime, now + AFTER)).done == 3


async def test_held_back_causes_are_announced_in_the_order_of_their_time(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    seconds = {"halfnote.c": 1, "halfnote.a": 2, "halfnote.b": 3}
    for topic, second in seconds.items():
        await announce_now(db, [announcement(0, now, topic=topic)], now)
        await announce_now(db, [announcement(second, now + timedelta(seconds=second), topic=topic)], now)
    assert await announce_held_back_now(db, now + AFTER) == 3
    assert [number for number, _ in (await announced(db))[3:]] == [1, 2, 3]


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_one_of_several_racing_connections_announces(db: Connection, dsn: str, outcome: str) -> None:
    now = datetime.now(UTC)
    first = await connect(dsn)
    transaction = first.transaction()
    await transaction.start()
    assert await announce(first, [announcement(0, now)], now) == 1
    others = [await connect(dsn) for _ in range(4)]
    racing = [
        asyncio.create_task(announce_now(other, [announcement(n, now)], now)) for n, other in enumerate(others, 1)
    ]
    await until_waiting(db, len(others))
    await getattr(transaction, outcome)()
    assert sum(await asyncio.gather(*racing)) == (0 if outcome == "commit" else 1)
    for connection in (first, *others):
        await connection.close()
    assert len(await announced(db)) == 1
    assert await db.fetchval("select held_back from announced") == (4 if outcome == "commit" else 3)


async def test_racing_replicas_announce_a_held_back_cause_once(db: Connection, dsn: str) -> None:
    now = datetime.now(UTC)
    for number in range(3):
        await announce_now(db, [announcement(number, now)], now)
    first = await connect(dsn)
    transaction = first.transaction()
    await transaction.start()
    assert await announce_withheld(first, now + AFTER) == 1
    # The locked row is skipped without a wait.
    assert await announce_held_back_now(db, now + AFTER) == 0
    await transaction.commit()
    await first.close()
    assert await announce_held_back_now(db, now + AFTER) == 0
    assert await announced(db) == [(0, 0), (2, 1)]


async def test_offsets_stay_in_order_without_deadlocks_beside_flushes(
    db: Connection, dsn: str, runtime: Runtime, group: str
) -> None:
    """8 connections commit and roll back, 4 settle the same ids as policy does and announce, 2 announce many causes."""
    deadlocks = "select deadlocks from pg_stat_database where datname = current_database()"
    before = await db.fetchval(deadlocks)
    ids = await store_halves(db, 400)
    finished = asyncio.Event()

    async def end(seed: int) -> int:
        rng, connection = random.Random(seed), await connect(dsn)
        for _ in range(25):
            batch = sorted(rng.sample(ids, 40))
            await record_ends(connection, [End(one, "shop", rng.choice(list(Verdict))) for one in batch], now_utc())
            plain = half_with(uuid7(now_utc()), b"1")
            async with connection.transaction():
                await insert_halves(connection, [plain], ["order"], now_utc())
                await record_ends(connection, [End(plain.transaction_id, None, Verdict.COMMIT)], now_utc())
        await connection.close()
        return 0

    async def roll_back_by_policy(seed: int) -> int:
        rng, connection, written = random.Random(seed), await connect(dsn), 0
        for turn in range(25):
            at = now_utc()
            batch = [End(one, None, Verdict.ROLLBACK, Source.POLICY) for one in sorted(rng.sample(ids, 5))]
            async with connection.transaction():
                await record_ends(connection, batch, at)
                causes = rng.sample(["shop", "bank", "post"], 3)
                written += await announce(
                    connection, [announcement(turn, at, cause) for cause in causes], at + turn * AFTER
                )
        await connection.close()
        return written

    async def announce_many(seed: int) -> int:
        rng, connection, written = random.Random(seed), await connect(dsn), 0
        for turn in range(25):
            causes = rng.sample([f"group-{n}" for n in range(20)], 15)
            at = now_utc()
            written += await announce_now(
                connection, [announcement(turn, at, cause, DEAD) for cause in causes], at + turn * AFTER
            )
            written += await announce_held_back_now(connection, at + turn * AFTER)
        await connection.close()
        return written

    follower = asyncio.create_task(follow(dsn, finished))
    async with asyncio.timeout(120):
        counts = await asyncio.gather(
            *map(end, range(8)), *map(roll_back_by_policy, range(8, 12)), *map(announce_many, (12, 13))
        )
    finished.set()
    seen = await follower
    assert sum(counts) == len(await announced(db)) > 0
    assert seen == [row[0] for row in await db.fetch('select "offset" from outbox order by 1')]
    assert await db.fetchval(deadlocks) == before
    backwards = (
        'select count(*) from (select committed_at < lag(committed_at) over (order by "offset") b from outbox) w'
    )
    assert await db.fetchval(backwards + " where b") == 0


def now_utc() -> datetime:
    return datetime.now(UTC)


async def follow(dsn: str, finished: asyncio.Event) -> list[int]:
    """Read the log as a relay does, from the last offset on, until `finished` and its end; return the offsets seen."""
    connection = await connect(dsn)
    seen: list[int] = []
    while True:
        last_round = finished.is_set()
        rows = await connection.fetch(
            'select "offset" from outbox where "offset" > $1 order by 1 limit 50', seen[-1] if seen else 0
        )
        seen.extend(row[0] for row in rows)
        if last_round and not rows:
            break
    await connection.close()
    return seen


async def test_the_offset_lock_is_taken_after_all_rows_are_written(db: Connection, dsn: str, group: str) -> None:
    now, holder, announcer = datetime.now(UTC), await connect(dsn), await connect(dsn)
    async with holder.transaction():
        await holder.execute(f"select pg_advisory_xact_lock({AdvisoryLock.OFFSET})")
        waiting = asyncio.create_task(announce_now(announcer, [announcement(1, now)], now))
        await until_waiting(db)
        # The holder of the lock does not wait for a row of the announcer.
        async with asyncio.timeout(10):
            await insert_halves(holder, [half_with(uuid7(now), b"1")], ["order"], now)
        held_until = await db.fetchval("select clock_timestamp()")
    assert await waiting == 1
    await holder.close()
    await announcer.close()
    assert await db.fetchval("select committed_at > $1 from outbox", held_until)


async def test_a_session_that_hangs_with_the_lock_is_terminated(db: Connection, dsn: str) -> None:
    now, hanging = datetime.now(UTC), await connect(dsn)
    transaction = hanging.transaction()
    await transaction.start()
    assert await announce(hanging, [announcement(1, now)], now) == 1
    async with asyncio.timeout(30):
        assert await announce_now(db, [announcement(2, now)], now) == 1
    assert await announced(db) == [(2, 0)]
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
        await transaction.commit()
    await hanging.close()


async def test_without_a_partition_the_message_is_held_back_and_its_cause_succeeds(
    db: Connection, runtime: Runtime
) -> None:
    now = runtime.clock.now()
    in_a_year = now + timedelta(days=365)
    assert await announce_now(db, [announcement(1, now)], in_a_year) == 0
    assert await announce_held_back_now(db, in_a_year + AFTER) == 0
    # The clock was wrong; an announcement in the future does not limit later ones.
    assert await announce_held_back_now(db, now) == 1
    assert await announced(db) == [(1, 0)]


async def test_a_clock_that_is_set_back_does_not_suppress_messages(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    assert await announce_now(db, [announcement(1, now)], now + timedelta(hours=1)) == 1
    assert await announce_now(db, [announcement(2, now)], now) == 1
    # A small difference between the clocks of two replicas is allowed for.
    assert await announce_now(db, [announcement(3, now)], now - timedelta(seconds=1)) == 0


async def test_old_limits_are_removed_but_not_held_back_messages(db: Connection, runtime: Runtime) -> None:
    now = runtime.clock.now()
    await announce_now(db, [announcement(1, now), announcement(2, now, "bank")], now)
    await announce_now(db, [announcement(3, now, "bank")], now)
    await forget(db, now)
    assert await db.fetchval("select count(*) from announced") == 2
    await clear_leftovers(db, now + ANNOUNCED_KEPT + timedelta(seconds=1))
    assert [tuple(row) for row in await db.fetch("select cause, held_back from announced")] == [("bank", 1)]


async def test_only_subscriptions_to_reserved_topics_get_operational_messages(
    db: Connection, runtime: Runtime, group: str
) -> None:
    relay, routing = Relay(runtime), Routing()
    await routing.step(runtime, runtime.clock.now())
    async with client_of(runtime) as client, Responder() as all_topics, Responder() as operator:
        await subscribe(client, all_topics, "everything", topics=["*", "h*"])
        await subscribe(client, all_topics, "paused", topics=["*"])
        await client.post("/subscriptions/paused/pause")
        await subscribe(client, operator, "people", topics=["halfnote.*"])
        now = runtime.clock.now()
        await announce_now(db, [announcement(1, now)], now)
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: all_topics.calls and operator.calls)
        one = await db.fetchval("select transaction_id from outbox where topic = $1", PARKED)
        deliveries = (await client.get(f"/transactions/{one}")).json()["messages"][0]["deliveries"]
        topics = {t["topic"]: t["subscriptions"] for t in (await client.get("/topics")).json()["items"]}
        lag = (await client.get("/subscriptions/paused")).json()["lag"]["messages"]
        await relay.drain(runtime)
    assert [call.headers["ce-type"] for call in all_topics.calls] == ["order"]
    [call] = operator.calls
    assert (call.headers["webhook-id"], call.headers["ce-type"]) == (f"{one}-0", PARKED)
    assert call.headers["ce-source"] == "/producer-groups/halfnote"
    assert [delivery["subscription"] for delivery in deliveries] == ["people"]
    assert topics == {"order": ["everything", "paused"], PARKED: ["people"]}
    assert lag == 1
    # Such a message does not hold the day of a paused subscription either.
    paused, day = await subscription_of(db, "paused"), (await days.day_of(db, one))
    assert paused is not None
    assert day is not None
    await db.execute("delete from outbox where topic = 'order'")
    assert await day_holders.undelivered(runtime, db, day, [paused]) == []
    assert (await routing.step(runtime, runtime.clock.now())).done == 0


def test_operational_messages_are_never_about_themselves() -> None:
    at = datetime(2026, 11, 21, tzinfo=UTC)
    own, mixed = ["halfnote.*", "halfnote.delivery.dead"], ["order", "halfnote.*"]
    fields: dict[str, Any] = {
        "message_id": "m-0",
        "key": None,
        "reason": "retries_exhausted",
        "error": None,
        "attempts": 17,
    }
    assert dead_letter("people", topic=PARKED, at=at, **fields) is None
    assert dead_letter("people", topic="order", at=at, **fields) is not None
    for topics, silent in ((own, True), (mixed, False), (["order"], False), (["*"], False)):
        assert (disabled("people", topics, reason="410", at=at) is None) is silent
        assert (breaker_opened("people", topics, because="x", at=at) is None) is silent
        assert (breaker_closed("people", topics, opened_at=at, at=at) is None) is silent


def test_the_documented_bodies_are_the_real_ones() -> None:
    at = datetime(2026, 11, 21, tzinfo=UTC)
    one = UndecidedTransaction(uuid7(at), "shop", "order", "order-1030", 1, at, 15)
    messages = [
        parked(one, reason="why", at=at),
        rolled_back(one, reason="why", at=at),
        dead_letter(
            "billing", message_id="m-0", topic="order", key=None, reason="refused", error=None, attempts=1, at=at
        ),
        disabled("billing", ["order"], reason="answered 410", at=at),
        expiring(
            "billing",
            ["order"],
            state="paused",
            oldest_s=9.0,
            backlog=7,
            expire_after_s=10.0,
            max_backlog=None,
            at=at,
        ),
        breaker_opened("billing", ["order"], because="no connection", at=at),
        findings(AnnouncedFindings(at.date(), "parked", 2, 2, 30, 30, ["x"]), at=at),
        breaker_closed("billing", ["order"], opened_at=at - timedelta(seconds=1.5), at=at),
    ]
    page = (ROOT / "docs" / "operational-messages.md").read_text()
    documented = {example["type"]: example for example in map(json.loads, re.findall(r"```json\n(.*?)```", page, re.S))}
    assert len(documented) == len(messages)
    for announced in messages:
        assert announced is not None
        assert list(documented[announced.topic]) == [*announced.body, "held_back"]
        assert announced.body["type"] == announced.topic
        assert f"| `{announced.topic}` |" in page
        assert f"### `{announced.topic}`" in page
    assert messages[-1].body["open_s"] == 1.5


def test_text_from_outside_is_sanitized_for_json() -> None:
    at = datetime(2026, 11, 21, tzinfo=UTC)
    announced = disabled("people", ["order"], reason="a\x00b\ud800" + "x" * 5000, at=at)
    assert announced is not None
    assert announced.body["reason"].startswith("a\ufffdb?x")
    assert len(announced.body["reason"]) == 2000


@both_plans
async def test_announcing_reads_no_big_table(full: Connection, generic: bool) -> None:
    now = datetime.now(UTC)
    await full.execute(
        "insert into announced select $1, 'group-' || n, $2, 0 from generate_series(1, 5000) n", PARKED, now
    )
    await full.execute("analyze announced")
    causes = [f"group-{n}" for n in range(500)]
    topics, none = [PARKED] * 500, [None] * 500
    kinds = ["text[]", "text[]", "int[]", "text[]", "bytea[]", "timestamptz", "uuid"]
    found = await scans(
        full, store.COUNT, kinds, [topics, causes, [1] * 500, none, [b"{}"] * 500, now, uuid7(now)], generic=generic
    )
    assert {scan.table for scan in found} <= {"day"}
    ids = [uuid7(now) for _ in causes]
    kinds = ["uuid[]", *["text[]"] * 3, "bytea[]", "bytea[]", "timestamptz", "text"]
    arguments = [ids, topics, causes, none, [b"{}"] * 500, [b"0"] * 500, now, "halfnote"]
    found = await scans(full, store.WRITE, kinds, arguments, generic=generic)
    assert big(found) == []
    assert {scan.table for scan in found} <= {"announced"}
    found = await scans(
        full, store.DUE, ["timestamptz", "timestamptz", "uuid", "int"], [now, now, uuid7(now), 500], generic=generic
    )
    assert {scan.table for scan in found} <= {"announced", "day"}
