"""`POST /dead-letters/redeliver` and `DELETE /dead-letters`: by ids and by filter, and what follows."""

import asyncio
from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection, connect
from app.operations import dead_letters as dead_letter_operations
from app.relay.loop import Relay
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from app.store.subscriptions.dead_letters import WINDOW_ROWS, DeadLetterCursor, window_floor
from app.store.subscriptions.redeliveries import act_on_window
from tests.conftest import shares
from tests.support.check_responder import Responder
from tests.support.days import go_to, long_ago
from tests.support.dead_letters import (
    AT,
    bury,
    by_filter,
    by_ids,
    committed,
    dead,
    drop,
    listed,
    mailer,
    many,
    redeliver,
    relay,
    subscription,
)
from tests.support.relay_stepping import offsets, order, publish, step, subscribe, turn_until

__all__ = ["mailer", "relay"]

pytestmark = pytest.mark.usefixtures("group")
ABORT = {"webhook-delivery": "abort-message", "halfnote-reason": "unknown customer"}


async def test_redelivered_ones_are_due_at_once_with_all_their_tries(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, mailer: str
) -> None:
    message_id = await dead(client, db, mailer)
    left_alone = await dead(client, db, mailer, 2)
    runtime.wake_ups.relay.clear()
    before = runtime.clock.now()
    wanted = by_ids("mailer", message_id, actor="dana", reason="mended")
    assert await redeliver(client, wanted) == {
        "dry_run": False,
        "redelivered": 1,
        "not_found": 0,
        "left": 0,
        "left_exact": True,
        "ids": [{"subscription": "mailer", "message_id": message_id}],
        "waiting": [],
    }
    assert runtime.wake_ups.relay.is_set()
    (retry,) = await db.fetch("select * from delivery_retry")
    assert (str(retry["transaction_id"]), retry["attempts"], retry["first_at"], retry["leased_until"]) == (
        message_id[:36],
        0,
        None,
        None,
    )
    assert before <= retry["due_at"] <= runtime.clock.now()
    assert (retry["key"], retry["topic"], retry["replay"], retry["body"]) == ("order-1030", "order", 0, None)
    (record,) = await db.fetch("select * from redelivery")
    assert (record["what"], record["actor"], record["reason"], record["at"]) == (
        "redelivered",
        "dana",
        "mended",
        retry["due_at"],
    )
    assert await listed(client) == [left_alone]
    again = await redeliver(client, wanted)
    assert (again["redelivered"], again["not_found"], again["ids"]) == (0, 1, [])
    assert await db.fetchval("select count(*) from redelivery") == 1


async def test_many_ids_some_of_them_twice_or_unknown(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    audit = await subscription(client, "audit")
    made = [await dead(client, db, mailer, number) for number in range(3)]
    await bury(db, made[0], audit)
    await bury(db, made[0], mailer, replay=2)
    wanted = by_ids("mailer", *made, made[0], f"{made[0][:-1]}5")
    wanted["ids"].append({"subscription": "audit", "message_id": made[0]})
    answer = await redeliver(client, wanted)
    assert (answer["redelivered"], answer["not_found"]) == (4, 1)
    assert {(one["subscription"], one["message_id"]) for one in answer["ids"]} == {
        ("audit", made[0]),
        *(("mailer", one) for one in made),
    }
    (left,) = (await client.get("/dead-letters")).json()["items"]
    assert left["replay"] == 2


async def test_a_subscription_that_is_gone_is_refused(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    message_id = await dead(client, db, mailer)
    await client.delete("/subscriptions/mailer")
    for wanted in (by_ids("mailer", message_id), by_filter(subscription="mailer"), by_ids("nobody", message_id)):
        for method, path in (("POST", "/dead-letters/redeliver"), ("DELETE", "/dead-letters")):
            answer = await client.request(method, path, json=wanted)
            assert (answer.status_code, answer.json()["type"]) == (404, "/problems/subscription-unknown")
    everything = await redeliver(client, by_filter(topic="order"))
    assert (everything["redelivered"], everything["left"]) == (0, 0)
    assert await db.fetchval("select count(*) from dead_letter") == 1


@pytest.mark.parametrize("acting", [redeliver, drop])
async def test_a_filter_acts_only_without_dry_run(
    client: httpx.AsyncClient, db: Connection, mailer: str, acting: Any
) -> None:
    made = [await dead(client, db, mailer, number, died_at=AT + timedelta(seconds=number)) for number in range(5)]
    done = "redelivered" if acting is redeliver else "dropped"
    reported = await acting(client, {"filter": {"subscription": "mailer"}, "at_most": 2})
    assert (reported["dry_run"], reported[done], reported["left"]) == (True, 0, 5)
    assert [one["message_id"] for one in reported["ids"]] == [made[4], made[3]]
    assert reported["died_before"] == "2026-11-21T08:00:04.000001Z"
    assert await db.fetchval("select count(*) from dead_letter") == 5
    acted = await acting(client, by_filter(at_most=2, subscription="mailer"))
    assert (acted["dry_run"], acted[done], acted["left"], acted["ids"]) == (False, 2, 3, reported["ids"])
    rest = await acting(client, by_filter(died_before="2026-11-21T08:00:02Z", died_after="2026-11-21T08:00:01Z"))
    assert [one["message_id"] for one in rest["ids"]] == [made[1]]
    assert set(await listed(client)) == {made[0], made[2]}
    assert await db.fetchval("select count(*) from redelivery where what = $1", done) == 3


async def test_large_filters_go_in_bounded_steps(client: httpx.AsyncClient, db: Connection, mailer: str) -> None:
    await many(db, 3500)
    answer = await redeliver(client, by_filter(at_most=2500, topic="order"))
    assert (answer["redelivered"], answer["left"], len(answer["ids"])) == (2500, 999, 2500)
    assert await db.fetchval("select count(distinct xmin::text) from delivery_retry") == 3
    answer = await drop(client, by_filter(at_most=10_000, subscription="mailer"))
    assert (answer["dropped"], answer["left"]) == (1000, 0)
    assert await db.fetchval("select count(*) from dead_letter") == 0


@pytest.mark.parametrize("acting", [redeliver, drop])
async def test_each_step_of_a_large_filter_has_a_loan_of_its_own(
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    mailer: str,
    monkeypatch: pytest.MonkeyPatch,
    acting: Any,
) -> None:
    """A connection that is in use for 5 minutes is closed, and a filter that few match may take longer than that."""
    await many(db, 3 * WINDOW_ROWS)
    longest = 0

    async def look(*arguments: Any) -> DeadLetterCursor | None:
        """Look for overdue connections at each window, as the loop does every 10 s."""
        nonlocal longest
        floor = await window_floor(*arguments)
        assert await runtime.database.close_overdue() == 0
        longest = max(longest, *runtime.database.lent._looks.values())
        return floor

    monkeypatch.setattr(dead_letter_operations, "window_floor", look)
    answer = await acting(client, by_filter(topic="rare"))
    assert (len(answer["ids"]), answer["left"], answer["left_exact"]) == (1, 0, True)
    assert longest == 1


async def test_an_act_that_runs_out_of_time_says_where_it_goes_on(
    client: httpx.AsyncClient, db: Connection, mailer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many may have died at one time, as those of a day that was closed by force."""
    await many(db, 2 * WINDOW_ROWS + 10)
    await db.execute("update dead_letter set died_at = $1", AT)
    # The last of them, in the order of lists.
    await db.execute(
        "update dead_letter set topic = case when transaction_id = (select transaction_id from dead_letter order by 1 "
        "limit 1) then 'rare' else 'order' end"
    )
    monkeypatch.setattr(dead_letter_operations, "ACT_S", 0)
    monkeypatch.setattr(dead_letter_operations, "LOOK_S", 0)
    wanted = by_filter(topic="rare")
    for _ in range(2):
        answer = await drop(client, wanted)
        assert (answer["dropped"], answer["left"], answer["left_exact"]) == (0, 0, False)
        wanted["cursor"] = answer["next_cursor"]
    answer = await drop(client, wanted)
    assert (answer["dropped"], "next_cursor" in answer) == (1, False)
    refused = await client.request("DELETE", "/dead-letters", json={**wanted, "cursor": "1"})
    assert (refused.status_code, refused.json()["field"]) == (422, "cursor")


async def test_an_act_that_the_database_ends_says_what_was_done(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, mailer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await many(db, 2500)

    async def lose(connection: Connection, *arguments: Any) -> Any:
        if await db.fetchval("select count(*) from redelivery"):
            await db.execute("select pg_terminate_backend($1, 10000)", connection.get_server_pid())
        return await act_on_window(connection, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(dead_letter_operations, "act_on_window", lose)
        answer = await drop(client, by_filter(at_most=10_000, subscription="mailer"))
    assert (answer["dropped"], len(answer["ids"]), answer["left_exact"]) == (1000, 1000, False)
    assert await db.fetchval("select count(*) from dead_letter") == 1500
    rest = await drop(client, {**by_filter(at_most=10_000, subscription="mailer"), "cursor": answer["next_cursor"]})
    assert (rest["dropped"], rest["left"], "next_cursor" in rest) == (1500, 0, False)


async def test_a_named_one_that_died_again_since_it_was_shown_is_left(
    client: httpx.AsyncClient, db: Connection, mailer: str
) -> None:
    message_id = await dead(client, db, mailer)
    wanted = by_ids("mailer", message_id, died_before=(AT + timedelta(microseconds=1)).isoformat())
    await db.execute("update dead_letter set died_at = died_at + interval '1 hour'")
    assert (await drop(client, wanted))["not_found"] == 1
    await db.execute("update dead_letter set died_at = $1", AT)
    assert (await drop(client, wanted))["dropped"] == 1


@shares
@pytest.mark.parametrize(
    ("wanted", "field"),
    [
        (None, "(body)"),
        ({}, "filter"),
        ({"filter": {}, "dry_run": False}, "filter"),
        ({"filter": {"topic": None}, "dry_run": False}, "filter.topic"),
        ({"filter": {"topics": "order"}}, "filter.topics"),
        ({"filter": {"died_after": "yesterday"}}, "filter.died_after"),
        ({"filter": {"topic": "order"}, "at_most": 10_001}, "at_most"),
        ({"filter": {"topic": "order"}, "dry_run": "no"}, "dry_run"),
        ({"ids": []}, "ids"),
        ({"ids": [{"subscription": "mailer", "message_id": "order-1"}]}, "ids[0].message_id"),
        ({"ids": [{"subscription": "mailer"}]}, "ids[0].message_id"),
        ({"ids": [], "filter": {"topic": "order"}}, "ids"),
        ({"filter": {"topic": "order"}, "reason": ""}, "reason"),
    ],
)
async def test_an_incomplete_selection_names_its_field(
    shared_client: httpx.AsyncClient, wanted: Any, field: str
) -> None:
    for method, path in (("POST", "/dead-letters/redeliver"), ("DELETE", "/dead-letters")):
        answer = (
            await shared_client.request(method, path, json=wanted)
            if wanted is not None
            else await shared_client.request(method, path)
        )
        assert (answer.status_code, answer.json().get("field")) == (422, field), answer.text


async def test_what_waits_for_its_subscription_is_said(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await client.post("/subscriptions/mailer/pause")
        receiver.status, receiver.headers = 200, {}
        answer = await redeliver(client, by_filter(subscription="mailer"))
        assert (answer["redelivered"], answer["waiting"]) == (1, [{"subscription": "mailer", "state": "paused"}])
        runtime.clock.offset_s += 2
        await step(relay, runtime)
        await step(relay, runtime)
        assert len(receiver.calls) == 1
        await client.post("/subscriptions/mailer/resume")
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
    assert len(receiver.calls) == 2


async def test_a_redelivered_message_arrives_and_is_receipted(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver)
        message_id = await committed(client, order(1, tag="new"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        receiver.status, receiver.headers = 200, {}
        await redeliver(client, by_ids("mailer", message_id))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
    first, second = receiver.calls
    for name in ("webhook-id", "halfnote-attempt", "halfnote-offset", "halfnote-tag", "ce-time"):
        assert first.headers[name] == second.headers[name]
    assert (second.headers["halfnote-attempt"], second.body) == ("1", first.body)
    assert await db.fetchval("select (select count(*) from delivery_retry) + (select count(*) from dead_letter)") == 0
    timeline = (await client.get(f"/transactions/{message_id[:36]}")).json()["timeline"]
    whats = [entry["what"] for entry in timeline]
    assert whats == ["born", "verdict", "published", "attempt", "dead", "redelivered", "delivered"]
    assert timeline[4]["reason"] == "unknown customer"


async def test_a_second_failure_makes_a_new_dead_letter(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver)
        message_id = await committed(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        for calls in (2, 3):
            await redeliver(client, by_ids("mailer", message_id, actor="dana", reason=f"try {calls}"))
            await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
            assert len(receiver.calls) == calls
    shown = (await client.get(f"/dead-letters/mailer/{message_id}")).json()
    assert (shown["reason"], shown["attempts"]) == ("unknown customer", 1)
    assert [(one["actor"], one["reason"]) for one in shown["redelivered"]] == [("dana", "try 2"), ("dana", "try 3")]


THEN = long_ago(10)


async def gone_with_its_day(client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection) -> str:
    """A dead letter of the subscription `mailer` whose day was removed; the clock is ten days later."""
    await go_to(runtime, db, THEN)
    await db.execute("update day set state = 'gone' where day = $1", THEN.date() - timedelta(days=1))
    message_id = await committed(client, order(1030, tag="created", headers={"Trace": "x"}))
    await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
    await go_to(runtime, db, THEN + timedelta(days=9))
    await retention_loop.step(runtime, THEN + timedelta(days=9))
    assert await db.fetchval("select state from day where day = $1", THEN.date()) == "gone"
    return message_id


async def test_a_message_whose_day_is_gone_is_redelivered_from_its_copy(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver)
        message_id = await gone_with_its_day(client, runtime, relay, db)
        assert (await client.get(f"/messages/{message_id}")).status_code == 410
        shown = (await client.get(f"/dead-letters/mailer/{message_id}")).json()
        assert (shown["body"], shown["tag"], shown["headers"]) == ({"order": 1030}, "created", {"Trace": "x"})
        receiver.status, receiver.headers = 200, {}
        await redeliver(client, by_ids("mailer", message_id))
        await retention_loop.step(runtime, runtime.clock.now())
        row = await db.fetchrow("select body, length(body_digest) as digest, tag from delivery_retry")
        assert row is not None
        assert tuple(row) == (b'{"order":1030}', 32, "created")
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 0 from delivery_retry"))
    first, second = receiver.calls
    for name in ("webhook-id", "ce-time", "ce-source", "halfnote-offset", "halfnote-tag", "halfnote-h-trace"):
        assert first.headers[name] == second.headers[name]
    assert (second.body, second.headers["content-type"]) == (first.body, first.headers["content-type"])
    assert await db.fetchval("select count(*) from dead_letter") == 0
    assert await db.fetchval("select string_agg(what, ',') from redelivery") == "redelivered"


async def test_a_copy_that_fails_again_is_a_dead_letter_with_its_copy(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver)
        message_id = await gone_with_its_day(client, runtime, relay, db)
        await redeliver(client, by_ids("mailer", message_id))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        assert len(receiver.calls) == 2
    shown = (await client.get(f"/dead-letters/mailer/{message_id}")).json()
    assert (shown["body"], shown["attempts"], len(shown["redelivered"])) == ({"order": 1030}, 1, 1)
    assert (await drop(client, by_ids("mailer", message_id)))["dropped"] == 1
    assert await db.fetchval("select count(*) from dead_letter") == 0


async def test_a_message_of_a_day_on_its_way_out_takes_its_copy_along(
    client: httpx.AsyncClient, db: Connection, mailer: str
) -> None:
    """Upkeep has looked at the day's retries and looks no more."""
    message_id = await dead(client, db, mailer)
    await db.execute("update day set state = 'archiving' where day = current_date")
    assert (await redeliver(client, by_ids("mailer", message_id)))["redelivered"] == 1
    row = await db.fetchrow("select r.*, h.body_digest as digest from delivery_retry r, half h")
    assert row is not None
    assert (row["body"], row["producer_group"], row["content_type"]) == (b'{"order":1030}', "shop", "application/json")
    assert (row["tag"], row["body_digest"]) == ("created", row["digest"])
    assert row["committed_at"] == await db.fetchval("select committed_at from outbox")
    assert (await drop(client, by_ids("mailer", message_id)))["not_found"] == 1


async def test_a_copy_that_is_given_meanwhile_is_not_lost(
    client: httpx.AsyncClient, db: Connection, dsn: str, mailer: str
) -> None:
    """Upkeep gives a dead letter its copy while a person redelivers it."""
    message_id = await dead(client, db, mailer)
    watcher = await connect(dsn)
    try:
        async with db.transaction():
            await db.execute(
                "update dead_letter set body = '1', content_type = 'application/json', producer_group = 'shop'"
            )
            asked = asyncio.create_task(redeliver(client, by_ids("mailer", message_id)))
            async with asyncio.timeout(20):
                while not await watcher.fetchval(
                    "select exists (select from pg_stat_activity "
                    "where datname = current_database() and wait_event_type = 'Lock')"
                ):
                    assert not asked.done()
        assert (await asked)["redelivered"] == 1
        # Other sessions skip locked rows and do not wait for them.
    finally:
        await watcher.close()
    assert await db.fetchval("select body from delivery_retry") == b"1"


async def test_concurrent_requests_redeliver_each_message_once(
    client: httpx.AsyncClient, db: Connection, mailer: str
) -> None:
    made = [await dead(client, db, mailer, number) for number in range(40)]
    named, backwards = by_ids("mailer", *made), by_ids("mailer", *reversed(made))
    wanted = [named, by_filter(subscription="mailer"), backwards, by_filter(topic="order"), named, backwards]
    answers = await asyncio.gather(*(redeliver(client, one) for one in wanted))
    moved = [one["message_id"] for answer in answers for one in answer["ids"]]
    assert sorted(moved) == sorted(made)
    assert await db.fetchval("select count(*) from delivery_retry") == 40
    assert await db.fetchval("select count(*) from redelivery") == 40


async def test_dropped_ones_stay_dropped_after_the_lease_changes_hands(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    """The checkpoint may stand before a dropped message: a taker must not begin it again."""
    first, taker = Relay(runtime), Relay(runtime)
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver)
        message_id = await committed(client, order(1))
        try:
            await turn_until(first, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
            answer = await drop(client, by_ids("mailer", message_id, actor="dana", reason="no such customer"))
            assert (answer["dropped"], answer["not_found"]) == (1, 0)
        finally:
            await first.drain(runtime)
        # As a crash leaves it.
        await db.execute('update checkpoint set "offset" = 0')
        receiver.status, receiver.headers = 200, {}
        [sent] = await publish(client, order(2))
        try:
            await turn_until(
                taker, runtime, lambda: db.fetchval("select count(*) = 1 from receipt where outcome = 'delivered'")
            )
        finally:
            await taker.drain(runtime)
    assert offsets(receiver)[1:] == [sent]
    assert (await drop(client, by_ids("mailer", message_id)))["not_found"] == 1
    shown = (await client.get(f"/messages/{message_id}")).json()
    assert [one["state"] for one in shown["deliveries"]] == ["dropped"]


async def test_a_held_keys_messages_follow_a_redelivered_one_in_order(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold")
        sent = await publish(client, *(order(number, key="k") for number in range(3)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from delivery_retry"))
        receiver.status, receiver.headers = 200, {}
        runtime.clock.offset_s += 5
        await step(relay, runtime)
        await step(relay, runtime)
        assert offsets(receiver) == sent[:1]
        await redeliver(client, by_filter(subscription="mailer"))
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 3 from receipt"))
    assert offsets(receiver) == [sent[0], *sent]


async def test_a_dropped_one_unblocks_its_key(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection
) -> None:
    async with Responder(status=422, **ABORT) as receiver:
        await subscribe(client, receiver, ordered="key", on_dead="hold")
        sent = await publish(client, *(order(number, key="k") for number in range(2)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from dead_letter"))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        receiver.status, receiver.headers = 200, {}
        await drop(client, by_filter(subscription="mailer"))
        runtime.clock.offset_s += 2
        await turn_until(
            relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt where outcome = 'delivered'")
        )
    assert offsets(receiver) == sent


@pytest.mark.parametrize("ordered", ["none", "key"])
@pytest.mark.parametrize("state", ["done", "cancelled", "running"])
async def test_a_replays_dead_letter_is_redelivered_as_of_the_replay(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, state: str, ordered: str
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, ordered=ordered)
        message_id = await committed(client, order(1))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        replay = await db.fetchval(
            'insert into replay (subscription_id, after, until, "offset", state, created_at, moved_at) '
            "select subscription_id, 0, $2::bigint, case when $1 = 'cancelled' then 0 else $2 end, $1, now(), now() "
            "from subscription returning replay_id",
            state,
            await db.fetchval('select max("offset") from outbox'),
        )
        await bury(db, message_id, "mailer", replay=replay)
        wanted = by_ids("mailer", message_id)
        assert (await redeliver(client, wanted))["not_found"] == 1
        wanted["ids"][0]["replay"] = replay
        assert (await redeliver(client, wanted))["ids"] == wanted["ids"]
        runtime.clock.offset_s += 2
        await turn_until(
            relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt where replay = $1", replay)
        )
        runtime.clock.offset_s += 2
        await turn_until(relay, runtime, lambda: db.fetchval("select state = 'done' from replay"))
    assert [call.headers.get("halfnote-replay") for call in receiver.calls] == [None, str(replay)]
    timeline = (await client.get(f"/transactions/{message_id[:36]}")).json()["timeline"]
    reported = [(entry["what"], entry.get("replay")) for entry in timeline]
    assert ("redelivered", replay) in reported
    assert ("replayed", replay) in reported


async def test_a_dry_run_counts_what_its_bound_covers(
    client: httpx.AsyncClient, db: Connection, mailer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an act on what was shown is refused, while messages go on to die."""
    numbers = iter(range(10))
    await dead(client, db, mailer, next(numbers), died_at=AT)
    listing = dead_letter_operations.list_dead_letters

    async def die_around(*arguments: Any, **options: Any) -> Any:
        await dead(client, db, mailer, (number := next(numbers)), died_at=AT + timedelta(seconds=number))
        found = await listing(*arguments, **options)
        await dead(client, db, mailer, (number := next(numbers)), died_at=AT + timedelta(seconds=number))
        return found

    with monkeypatch.context() as patched:
        patched.setattr(dead_letter_operations, "list_dead_letters", die_around)
        counted = await redeliver(client, {"filter": {"subscription": "mailer"}})
    covered = await redeliver(client, {"filter": {"subscription": "mailer", "died_before": counted["died_before"]}})
    assert counted["left"] == covered["left"] == 2


@pytest.mark.parametrize("acting", [redeliver, drop])
async def test_what_dies_after_a_dry_run_is_left_out(
    client: httpx.AsyncClient, db: Connection, mailer: str, acting: Any
) -> None:
    shown = [await dead(client, db, mailer, number, died_at=AT + timedelta(days=number)) for number in range(2)]
    counted = await acting(client, {"filter": {"subscription": "mailer"}})
    bound = counted["died_before"]
    earlier = (AT + timedelta(hours=1)).isoformat()
    earlier_bound = (await acting(client, {"filter": {"subscription": "mailer", "died_before": earlier}}))[
        "died_before"
    ]
    assert earlier_bound == "2026-11-21T08:00:00.000001Z"
    later = await dead(client, db, mailer, 2, died_at=AT + timedelta(days=1, microseconds=1))
    acted = await acting(client, by_filter(subscription="mailer", died_before=bound))
    assert {one["message_id"] for one in acted["ids"]} == set(shown)
    assert "died_before" not in acted
    assert await listed(client) == [later]
    none = await acting(client, {"filter": {"topic": "other"}})
    assert (none["left"], none["died_before"] > bound) == (0, True)
