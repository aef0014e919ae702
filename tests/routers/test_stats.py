"""`GET /stats`: what stands open with the oldest of each, and what was done, by the minute."""

from datetime import datetime, timedelta

import httpx
import pytest

from app.database.connection import Connection
from app.loops.minutes import KEPT_DAYS, ActivityCounter, StandingSampler
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.admin.figures import count_dead_letters, undecided_by_state
from app.verdicts import CheckBackState
from tests.support.check_responder import Responder
from tests.support.dead_letters import bury, committed, subscription
from tests.support.relay_stepping import subscribe, turn_until

ORDER = {"topic": "order", "key": "order-1030", "body": {"order": 1030}}


async def half(client: httpx.AsyncClient) -> str:
    answer = await client.post("/half", json={"producer_group": "shop", "messages": [ORDER]})
    return str(answer.json()["transaction_id"])


async def end(client: httpx.AsyncClient, transaction_id: str, verdict: str) -> None:
    content = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": verdict}
    assert (await client.post("/end", json=content)).status_code == 200


async def doubt(db: Connection, transaction_id: str, state: CheckBackState) -> None:
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at) values ($1::uuid, 'shop', $2, now())",
        transaction_id,
        state,
    )


async def stats(client: httpx.AsyncClient) -> dict:  # type: ignore[type-arg]
    answer = await client.get("/stats")
    assert answer.status_code == 200, answer.text
    found: dict = answer.json()  # type: ignore[type-arg]
    return found


async def test_an_empty_service_has_figures_of_nothing(client: httpx.AsyncClient) -> None:
    found = await stats(client)
    none = {"count": 0, "exact": True, "oldest": None, "oldest_born_at": None}
    assert (found["in_doubt"], found["parked"]) == (none, none)
    assert found["dead_letters"] == {"count": 0, "exact": True, "oldest_at": None}
    assert found["breakers"] == {"count": 0, "first": []}
    assert found["subscriptions"] == {"active": 0, "paused": 0, "disabled": 0}
    assert (found["lag"], found["held_days"], found["proof"]) == (None, [], None)
    assert found["workers"] == {"present": 0, "unheld_shards": 0}
    assert found["disk"]["database_bytes"] > 0
    assert [one["window_s"] for one in found["activity"]] == [900, 86_400]
    assert {one["halves"]["count"] for one in found["activity"]} == {0}


async def test_what_stands_open_has_its_oldest(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    first, second, third, decided = [await half(client) for _ in range(4)]
    for one in (first, second, decided):
        await doubt(db, one, CheckBackState.IN_DOUBT)
    await doubt(db, third, CheckBackState.PARKED)
    # A verdict that arrived after the row was written counts.
    await end(client, decided, "rollback")
    await end(client, first, "commit")
    found = await stats(client)
    shown = (await client.get(f"/transactions/{second}")).json()
    born_at = {"oldest_born_at": shown["born_at"]}
    assert found["in_doubt"] == {"count": 1, "exact": True, "oldest": second, **born_at}
    assert (found["parked"]["count"], found["parked"]["oldest"]) == (1, third)


async def test_large_counts_are_of_rows(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    ids = sorted([await half(client) for _ in range(3)])
    for one in ids:
        await doubt(db, one, CheckBackState.IN_DOUBT)
    await subscription(client, "mailer")
    for _ in range(3):
        await bury(db, await committed(client, ORDER), "mailer")
    await end(client, ids[-1], "commit")
    died = "delete from dead_letter where transaction_id in (select transaction_id from dead_letter limit 1)"
    await db.execute(died)
    # Above the limit rows are counted, also the one that has a verdict.
    for most, count, exact in ((1, 3, False), (2, 3, False), (3, 2, True), (4, 2, True)):
        found = (await undecided_by_state(db, most=most))[CheckBackState.IN_DOUBT]
        assert (found.count, found.exact, str(found.transaction_id)) == (count, exact, ids[0])
    for most, exact in ((1, False), (2, True), (3, True)):
        dead = await count_dead_letters(db, most=most)
        assert (dead.count, dead.exact) == (2, exact)


@pytest.mark.parametrize("state", list(CheckBackState))
async def test_the_oldest_has_a_bound_while_the_rows_looked_at_are_decided(
    client: httpx.AsyncClient, db: Connection, group: str, state: CheckBackState
) -> None:
    # Ids of one millisecond are in any order.
    ids = sorted([await half(client) for _ in range(4)])
    for one in ids:
        await doubt(db, one, state)
    for one in ids[:3]:
        await end(client, one, "commit")
    born_at = {
        str(row["transaction_id"]): row["born_at"] for row in await db.fetch("select transaction_id, born_at from half")
    }
    # The last row that was looked at is no younger than the one in doubt, which is found past the decided ones.
    for most, oldest, born in ((1, None, ids[1]), (2, None, ids[2]), (3, ids[3], ids[3]), (4, ids[3], ids[3])):
        found = (await undecided_by_state(db, most=most))[state]
        assert (found.transaction_id and str(found.transaction_id), found.born_at) == (oldest, born_at[born])
    # All rows are looked at, and none is undecided.
    await end(client, ids[3], "commit")
    found = (await undecided_by_state(db, most=4))[state]
    assert (found.count, found.transaction_id, found.born_at) == (0, None, None)


async def test_dead_letters_of_a_deleted_subscription_do_not_count(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    for name in ("crm", "mailer"):
        await subscription(client, name)
        await bury(db, await committed(client, ORDER), name)
    died_at = await db.fetchval(
        "select died_at from dead_letter d join subscription s using (subscription_id) where s.name = 'mailer'"
    )
    await client.delete("/subscriptions/crm")
    found = (await stats(client))["dead_letters"]
    assert (found["count"], datetime.fromisoformat(found["oldest_at"])) == (1, died_at)


async def test_open_breakers_and_stopped_subscriptions(client: httpx.AsyncClient, db: Connection) -> None:
    for name in ("mailer", "crm", "paused", "calm"):
        await subscription(client, name)
    opened = (
        "update checkpoint c set opened_at = now() - $2::interval, opened_because = '503' "
        "from subscription s where s.subscription_id = c.subscription_id and s.name = $1"
    )
    for name, minutes in (("mailer", 1), ("crm", 2), ("paused", 3)):
        await db.execute(opened, name, timedelta(minutes=minutes))
    await client.post("/subscriptions/paused/pause")
    found = await stats(client)
    assert found["breakers"]["count"] == 2
    assert [(one["subscription"], one["because"]) for one in found["breakers"]["first"]] == [
        ("crm", "503"),
        ("mailer", "503"),
    ]
    assert found["subscriptions"] == {"active": 3, "paused": 1, "disabled": 0}


async def test_the_oldest_lag_is_of_the_subscription_whose_message_waits_longest(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    await subscription(client, "photos", topics=["photo"])
    await subscription(client, "refunds", filters={"tags": ["refunded"]})
    await subscription(client, "paused")
    await client.post("/subscriptions/paused/pause")
    assert (await stats(client))["lag"] is None
    await committed(client, ORDER)
    # Its message is of another topic or tag, or it is paused.
    assert (await stats(client))["lag"] is None
    await subscription(client, "mailer")
    message_ids = [await committed(client, ORDER) for _ in range(2)]
    await subscription(client, "crm")
    await committed(client, ORDER)
    await db.execute("update outbox set committed_at = committed_at - interval '1 minute'")
    found = (await stats(client))["lag"]
    assert (found["subscription"], found["messages"], found["exact"]) == ("mailer", 3, True)
    assert 60 <= found["seconds"] < 120
    # Once these are dead, the message that waits longest is of both.
    for message_id in message_ids:
        await bury(db, message_id, "mailer")
    assert (await stats(client))["lag"]["messages"] == 1


async def test_what_processes_did_is_added_by_the_minute(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    counter, relay = ActivityCounter(runtime.metrics), Relay(runtime)
    async with Responder(status=204) as receiver:
        await subscribe(client, receiver)
        await committed(client, ORDER)
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) from receipt"))
        await relay.drain(runtime)
        await end(client, await half(client), "rollback")
        now = runtime.clock.now().replace(second=30, microsecond=0)
        runtime.clock.fixed = now
        assert (await counter.step(runtime, now)).done == 1
        assert (await counter.step(runtime, now)).done == 0
        # Another process adds to the same minute, and one that stops adds what it did last.
        other = ActivityCounter(runtime.metrics)
        await half(client)
        await other.drain(runtime)
        short, long = (await stats(client))["activity"]
        done = {name: short[name]["count"] for name in ("halves", "commits", "rollbacks", "deliveries")}
        assert done == {"halves": 3, "commits": 1, "rollbacks": 1, "deliveries": 1}
        assert short["covered_s"] == 30
        assert short["halves"]["per_s"] == pytest.approx(3 / 30)
        for later, counts in (
            (timedelta(minutes=14), (3, 3)),
            (timedelta(minutes=16), (0, 3)),
            (timedelta(days=2), (0, 0)),
        ):
            runtime.clock.fixed = now + later
            short, long = (await stats(client))["activity"]
            assert (short["halves"]["count"], long["halves"]["count"]) == counts, later


async def test_failed_attempts_and_checks_are_counted_apart(
    client: httpx.AsyncClient, runtime: Runtime, group: str
) -> None:
    counter = ActivityCounter(runtime.metrics)
    for outcome, times in (("delivered", 2), ("failed", 3), ("refused", 1)):
        runtime.metrics.relay.deliveries.labels("mailer", outcome).inc(times)
    runtime.metrics.checkback.checks.labels("commit").inc(4)
    await counter.step(runtime, runtime.clock.now())
    short = (await stats(client))["activity"][0]
    assert [short[name]["count"] for name in ("deliveries", "failed_attempts", "checks")] == [2, 4, 4]


async def test_one_worker_at_a_time_writes_what_stands_open_once_a_minute(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    await doubt(db, await half(client), CheckBackState.IN_DOUBT)
    old = runtime.clock.now() - timedelta(days=KEPT_DAYS, hours=1)
    await db.execute("insert into stats_minute (minute) values ($1)", old)
    first, second, now = StandingSampler(), StandingSampler(), runtime.clock.now().replace(second=1)
    assert (await first.step(runtime, now)).done == 1
    assert (await first.step(runtime, now + timedelta(seconds=15))).done == 0
    runtime.owner, owner = "other", runtime.owner
    assert (await second.step(runtime, now)).done == 0
    [row] = await db.fetch("select * from stats_minute")
    assert (row["in_doubt"], row["parked"], row["lag_s"]) == (1, 0, 0)
    assert row["database_bytes"] > 0
    # The lease is free once its holder has stopped.
    runtime.owner = owner
    await first.drain(runtime)
    runtime.owner = "other"
    later = runtime.clock.now().replace(second=1) + timedelta(minutes=1)
    assert (await second.step(runtime, later)).done == 1
    assert await db.fetchval("select count(*) from stats_minute") == 2
