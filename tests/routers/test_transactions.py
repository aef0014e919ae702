"""`GET /transactions/{id}`, its attempts and `GET /messages/{id}`: states, timelines and bodies."""

import base64
from typing import Any
from uuid import UUID

import httpx
import pytest

import app.store.coordinator.transactions as lists
from app.database.connection import Connection
from app.ids import id_day, uuid7
from app.runtime.state import Runtime
from app.store.coordinator import history
from app.store.coordinator.attempts import EARLIER_ATTEMPTS, HIGHEST_ID, LATEST_ATTEMPTS
from app.store.coordinator.deliveries import DELIVERIES, DELIVERIES_MAX
from app.store.coordinator.halves import MESSAGE_BODY
from tests.coordinator.test_half_end import ORDER, post_end, post_half
from tests.coordinator.test_statement_plans import full
from tests.support.explain import big, scans

__all__ = ["full"]


async def in_doubt(db: Connection, transaction_id: str, state: int = 1, **columns: Any) -> None:
    """Put a transaction into check_back, as the sweep does."""
    row = {"producer_group": "shop", "asked": 0, "parked_at": None, "parked_reason": None, **columns}
    await db.execute(
        "insert into check_back (transaction_id, state, swept_at, next_check_at, producer_group, asked, parked_at, "
        "parked_reason) values ($1, $2, now(), now() + interval '30 s', $3, $4, $5, $6)",
        UUID(transaction_id),
        state,
        *row.values(),
    )


async def half_of(client: httpx.AsyncClient, *messages: dict[str, object], **fields: object) -> str:
    answer = await post_half(client, *messages, **fields)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def test_a_half_is_shown_with_what_is_known_of_it(client: httpx.AsyncClient, group: str) -> None:
    made = (await post_half(client, ORDER, {"topic": "points", "body": 1}, context={"b": 1, "a": None})).json()
    shown = (await client.get(f"/transactions/{made['transaction_id']}")).json()
    assert shown == {
        "transaction_id": made["transaction_id"],
        "producer_group": "shop",
        "state": "half",
        "born_at": made["born_at"],
        "first_check_at": made["first_check_at"],
        "next_check_at": made["first_check_at"],
        "context": {"b": 1, "a": None},
        "messages": [
            {
                "message_id": f"{made['transaction_id']}-0",
                "topic": "order",
                "key": "order-1030",
                "tag": "created",
                "headers": {},
                "content_type": "application/json",
                "deliveries": [],
            },
            {
                "message_id": f"{made['transaction_id']}-1",
                "topic": "points",
                "key": None,
                "tag": None,
                "headers": {},
                "content_type": "application/json",
                "deliveries": [],
            },
        ],
        "timeline": [{"at": made["born_at"], "what": "born"}],
        "attempts_cursor": None,
        "deliveries_cursor": None,
    }


async def test_a_context_that_is_null_is_not_left_out(client: httpx.AsyncClient, group: str) -> None:
    with_null, without = await half_of(client, context=None), await half_of(client)
    assert (await client.get(f"/transactions/{with_null}")).json()["context"] is None
    assert "context" not in (await client.get(f"/transactions/{without}")).json()


async def test_the_timeline_of_a_committed_transaction(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    transaction_id = await half_of(client, {**ORDER, "headers": {"Trace": "x"}, "deliver_after_s": 60})
    key = UUID(transaction_id)
    await db.execute(
        "insert into attempt (transaction_id, kind, at, outcome) values ($1, 'swept', now(), 'swept')", key
    )
    await db.execute(
        "insert into attempt (transaction_id, kind, at, number, outcome, destination, status, duration_ms, response) "
        "values ($1, 'check', now(), 1, 'unanswered', 'http://127.0.0.1:9/check', 500, 12, 'broken')",
        key,
    )
    await post_end(client, transaction_id, "commit", reason="paid")
    await post_end(client, transaction_id, "rollback")
    subscription = await subscribe(db, "mailer")
    await db.execute(
        "insert into attempt (transaction_id, kind, at, number, outcome, position, subscription_id, destination, "
        "error) values ($1, 'delivery', now(), 1, 'failed', 0, $2, 'http://127.0.0.1:9/in', 'refused')",
        key,
        subscription,
    )
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, status, settled_at) values ($1, 0, $2, 1, 'delivered', 2, now(), 7, 204, now())",
        key,
        subscription,
    )
    shown = (await client.get(f"/transactions/{transaction_id}")).json()
    assert shown["state"] == "committed"
    assert "next_check_at" not in shown
    verdict = shown["verdict"]
    assert verdict == {
        "verdict": "commit",
        "source": "producer",
        "reason": "paid",
        "decided_at": verdict["decided_at"],
    }
    message = shown["messages"][0]
    assert message["headers"] == {"Trace": "x"}
    assert (message["deliver_after_s"], message["offset"] > 0, message["due_at"] > shown["born_at"]) == (60, True, True)
    (delivery,) = message["deliveries"]
    assert (delivery["subscription"], delivery["state"], delivery["attempts"]) == ("mailer", "delivered", 2)
    whats = [entry["what"] for entry in shown["timeline"]]
    assert whats == ["born", "swept", "check", "verdict", "published", "refused", "attempt", "delivered"]
    entries = dict(zip(whats, shown["timeline"], strict=True))
    assert {**entries["check"], "at": ""} == {
        "at": "",
        "what": "check",
        "check": 1,
        "url": "http://127.0.0.1:9/check",
        "outcome": "unanswered",
        "status": 500,
        "duration_ms": 12,
        "response": "broken",
    }
    assert (entries["refused"]["verdict"], entries["refused"]["producer_group"]) == ("rollback", "shop")
    assert (entries["attempt"]["subscription"], entries["attempt"]["error"]) == ("mailer", "refused")
    times = [entry["at"] for entry in shown["timeline"]]
    assert times == sorted(times)


def with_pages_of(runtime: Runtime, most: int) -> None:
    runtime.settings = runtime.settings.model_copy(update={"attempts_page_max": most})


async def attempted(db: Connection, transaction_id: str, *kinds: str) -> None:
    for number, kind in enumerate(kinds):
        await db.execute(
            "insert into attempt (transaction_id, kind, at, outcome, error, number) "
            "values ($1, $2, now(), $2, 'why', $3)",
            UUID(transaction_id),
            kind,
            number,
        )


async def test_a_file_of_a_timeline_says_that_earlier_attempts_are_elsewhere(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    transaction_id = await half_of(client)
    await attempted(db, transaction_id, *["check"] * 5)
    path = f"/console/transactions/{transaction_id}?format=csv"
    assert "This file is not complete" not in (await client.get(path)).text
    with_pages_of(runtime, 3)
    last = (await client.get(path)).text.splitlines()[-1]
    elsewhere = f"GET /transactions/{transaction_id}/attempts has the earlier attempts."
    assert last == f"This file is not complete. {elsewhere}"


async def test_however_much_came_after_it_a_sweep_and_a_parking_are_shown(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    with_pages_of(runtime, 3)
    transaction_id = await half_of(client)
    await attempted(db, transaction_id, "swept", "check", "parked", *["check"] * 4)
    shown = (await client.get(f"/transactions/{transaction_id}")).json()
    timeline = shown["timeline"]
    assert [entry["what"] for entry in timeline] == ["born", "swept", "parked", "check", "check", "check"]
    assert (timeline[1].keys(), timeline[2]["reason"]) == ({"at", "what"}, "why")
    earlier = (
        await client.get(f"/transactions/{transaction_id}/attempts", params={"cursor": shown["attempts_cursor"]})
    ).json()
    assert [entry["check"] for entry in earlier["items"]] == [3, 1]
    assert earlier["next_cursor"] is None


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
async def test_pages_hold_each_attempt_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, limit: int
) -> None:
    with_pages_of(runtime, 3)
    transaction_id = await half_of(client)
    await attempted(db, transaction_id, *["check"] * 7)
    pages, cursor = [], None
    while True:
        query = {"limit": limit} if cursor is None else {"limit": limit, "cursor": cursor}
        page = (await client.get(f"/transactions/{transaction_id}/attempts", params=query)).json()
        pages.append([entry["check"] for entry in page["items"]])
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [number for numbers in pages for number in numbers] == [6, 5, 4, 3, 2, 1, 0]
    # The setting bounds a page that asks for more.
    assert all(len(numbers) == min(limit, 3) for numbers in pages[:-1])


async def test_a_short_timeline_is_whole(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    with_pages_of(runtime, 3)
    transaction_id = await half_of(client)
    await attempted(db, transaction_id, "swept", *["check"] * 3)
    shown = (await client.get(f"/transactions/{transaction_id}")).json()
    assert (len(shown["timeline"]), shown["attempts_cursor"]) == (5, None)


async def test_only_a_number_is_a_cursor_of_attempts(client: httpx.AsyncClient, group: str) -> None:
    transaction_id = await half_of(client)
    for cursor in ("x", "-1", str(2**63)):
        answer = await client.get(f"/transactions/{transaction_id}/attempts", params={"cursor": cursor})
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid")
        assert "cursor" in answer.text


async def subscribe(db: Connection, name: str, **columns: Any) -> int:
    """Write a subscription's row; return its id."""
    row: dict[str, Any] = {
        "topics": ["*"],
        "destination": '{"type": "webhook", "url": "http://127.0.0.1:9/in"}',
        "secrets": "[]",
        "start": '"latest"',
        "max_in_flight": 16,
        "timeout_s": 10.0,
        "retry": [1.0],
        "state": "active",
        **columns,
    }
    names, marks = ", ".join(row), ", ".join(f"${index}" for index in range(2, len(row) + 2))
    made: int = await db.fetchval(
        f"insert into subscription (name, created_at, updated_at, started_after, matches_since, {names}) "
        f"values ($1, now(), now(), 0, now(), {marks}) "
        "returning subscription_id",
        name,
        *row.values(),
    )
    return made


async def test_deliveries_under_way_and_dead(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    transaction_id = await half_of(client)
    await post_end(client, transaction_id, "commit")
    late, failing, dead = [await subscribe(db, name) for name in ("late", "failing", "dead")]
    for subscription, attempts in ((late, 0), (failing, 3)):
        await write_retry(db, transaction_id, subscription, attempts=attempts, last_error="timed out")
    await write_dead(db, transaction_id, dead)
    shown = (await client.get(f"/messages/{transaction_id}-0")).json()
    states = {delivery["subscription"]: delivery["state"] for delivery in shown["deliveries"]}
    assert states == {"late": "waiting", "failing": "in_retry", "dead": "dead"}
    assert not any("replay" in delivery for delivery in shown["deliveries"])
    timeline = (await client.get(f"/transactions/{transaction_id}")).json()["timeline"]
    assert (timeline[-1]["what"], timeline[-1]["reason"]) == ("dead", "tries used up")


async def write_retry(db: Connection, transaction_id: str, subscription: int, **columns: Any) -> None:
    """Write the row of a message that is to be tried again."""
    row = {"replay": 0, "attempts": 1, "last_error": None, **columns}
    await db.execute(
        'insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, due_at, replay, '
        'attempts, last_error) select $1, transaction_id, position, "offset", topic, now(), $3, $4, $5 from outbox '
        "where transaction_id = $2 and position = 0",
        subscription,
        UUID(transaction_id),
        *row.values(),
    )


async def write_dead(db: Connection, transaction_id: str, subscription: int, **columns: Any) -> None:
    """Write a message's dead letter."""
    row = {"replay": 0, "attempts": 5, "reason": "tries used up", **columns}
    await db.execute(
        'insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, died_at, replay, '
        'attempts, reason) select $1, transaction_id, position, "offset", topic, key, now(), $3, $4, $5 from outbox '
        "where transaction_id = $2 and position = 0",
        subscription,
        UUID(transaction_id),
        *row.values(),
    )


async def replayed(db: Connection, transaction_id: str, position: int, subscription: int, times: int) -> None:
    """Write the receipts of the live delivery of a message, and of replays of it."""
    await db.execute(
        'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, status, settled_at, replay) "
        "select $1, $2, $3, 1, 'delivered', 1, now(), 7, 204, now(), n from generate_series(0, $4) n",
        UUID(transaction_id),
        position,
        subscription,
        times,
    )


async def test_a_transaction_has_some_of_its_deliveries_and_leads_to_the_others(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    transaction_id = await half_of(client, ORDER, ORDER)
    await post_end(client, transaction_id, "commit")
    # Two of one name: a name can be used again after its subscription was deleted.
    first = await subscribe(db, "mailer")
    await db.execute("update subscription set deleted_at = now()")
    for position, name in ((0, first), (0, "mailer"), (1, "Shop"), (1, "crm")):
        subscription = name if isinstance(name, int) else await subscribe(db, name)
        await replayed(db, transaction_id, position, subscription, 400)
    path = f"/transactions/{transaction_id}"
    shown = (await client.get(path)).json()
    assert [len(message["deliveries"]) for message in shown["messages"]] == [802, DELIVERIES_MAX - 802]
    settled = [entry for entry in shown["timeline"] if entry["what"] in ("delivered", "replayed")]
    assert len(settled) == DELIVERIES_MAX
    found = [
        {**one, "message_id": message["message_id"]} for message in shown["messages"] for one in message["deliveries"]
    ]
    cursor, pages = shown["deliveries_cursor"], []
    while cursor is not None:
        page = (await client.get(f"{path}/deliveries", params={"cursor": cursor, "limit": 250})).json()
        pages.append(len(page["items"]))
        cursor, found = page["next_cursor"], found + page["items"]
    assert pages == [250, 250, 104]
    whole = (await client.get(f"{path}/deliveries", params={"limit": 1000})).json()
    assert whole["items"] == found[:1000]
    each = [(one["message_id"], one["subscription"], one.get("replay", 0)) for one in found]
    assert each[:802] == [(f"{transaction_id}-0", "mailer", n) for _ in (1, 2) for n in range(401)]
    assert sorted(each[802:]) == sorted(
        (f"{transaction_id}-1", name, n) for name in ("Shop", "crm") for n in range(401)
    )


async def test_a_message_has_some_of_its_deliveries_and_leads_to_the_others(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    transaction_id = await half_of(client, ORDER, ORDER, ORDER)
    await post_end(client, transaction_id, "commit")
    mailer = await subscribe(db, "mailer")
    for position, times in ((0, 3), (1, 1500), (2, 3)):
        await replayed(db, transaction_id, position, mailer, times)
    path, found, query = f"/messages/{transaction_id}-1", [], {}
    for number in (1000, 501):
        shown = (await client.get(path, params=query)).json()
        assert (len(shown["deliveries"]), shown["body"]) == (number, ORDER["body"])
        found += [one.get("replay", 0) for one in shown["deliveries"]]
        query = {"cursor": shown["deliveries_cursor"]}
    assert found == list(range(1501))
    assert query == {"cursor": None}
    for short in (0, 2):
        few = (await client.get(f"/messages/{transaction_id}-{short}")).json()
        assert (len(few["deliveries"]), few["deliveries_cursor"]) == (4, None)


async def test_only_what_was_answered_is_a_cursor_of_deliveries(client: httpx.AsyncClient, group: str) -> None:
    transaction_id = await half_of(client)
    for cursor in ("x", "0-1-0-", "0-9999999999-0-mailer", "0-1-0-" + 256 * "m", "0-1-0-a b"):
        for path in (f"/transactions/{transaction_id}/deliveries", f"/messages/{transaction_id}-0"):
            answer = await client.get(path, params={"cursor": cursor})
            assert (answer.status_code, answer.json()["type"], answer.json()["field"]) == (
                422,
                "/problems/invalid",
                "cursor",
            )


async def test_a_replays_deliveries_stand_beside_the_live_one(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    one = await half_of(client)
    await post_end(client, one, "commit")
    mailer = await subscribe(db, "mailer")
    for replay in (0, 4):
        await db.execute(
            'insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, '
            "duration_ms, status, settled_at, replay) values ($1, 0, $2, 1, 'delivered', 1, now(), 7, 204, now(), $3)",
            UUID(one),
            mailer,
            replay,
        )
    await db.execute(
        "insert into attempt (transaction_id, kind, at, number, outcome, position, subscription_id, error, replay) "
        "values ($1, 'delivery', now(), 1, 'failed', 0, $2, 'refused', 5)",
        UUID(one),
        mailer,
    )
    await write_retry(db, one, mailer, replay=5)
    await write_dead(db, one, mailer, replay=6)
    shown = (await client.get(f"/transactions/{one}")).json()
    deliveries = [(one["state"], one.get("replay")) for one in shown["messages"][0]["deliveries"]]
    assert deliveries == [("delivered", None), ("delivered", 4), ("in_retry", 5), ("dead", 6)]
    entries = [(entry["what"], entry.get("replay")) for entry in shown["timeline"][3:]]
    assert sorted(entries, key=str) == [("attempt", 5), ("dead", 6), ("delivered", None), ("replayed", 4)]


async def test_what_a_person_did_is_on_the_timeline(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    transaction_id = await half_of(client)
    await post_end(client, transaction_id, "commit")
    mailer = await subscribe(db, "mailer")
    who = {
        "actor": "dana",
        "reason": "repaired",
        "ids": [{"subscription": "mailer", "message_id": f"{transaction_id}-0"}],
    }
    await write_dead(db, transaction_id, mailer)
    assert (await client.post("/dead-letters/redeliver", json=who)).json()["redelivered"] == 1
    await db.execute("delete from delivery_retry")
    await write_dead(db, transaction_id, mailer)
    gone = await client.request("DELETE", "/dead-letters", json={**who, "reason": "too late"})
    assert gone.json()["dropped"] == 1
    shown = (await client.get(f"/transactions/{transaction_id}")).json()
    entries = [{name: value for name, value in entry.items() if name != "at"} for entry in shown["timeline"][-4:]]
    same = {"message_id": f"{transaction_id}-0", "subscription": "mailer"}
    died = {"what": "dead", **same, "attempts": 5, "reason": "tries used up"}
    assert entries == [
        died,
        {"what": "redelivered", **same, "actor": "dana", "reason": "repaired"},
        died,
        {"what": "dropped", **same, "actor": "dana", "reason": "too late"},
    ]
    (delivery,) = shown["messages"][0]["deliveries"]
    assert (delivery["subscription"], delivery["state"]) == ("mailer", "dropped")


async def test_messages_above_the_checkpoint_are_waiting(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    wanted = {
        "every": {"topics": ["*"]},
        "prefix": {"topics": ["ord*"], "filters": '{"tags": ["created"], "headers": {"Region": "eu"}}'},
        "nulls": {"topics": ["order"], "filters": '{"tags": null, "headers": null}'},
        "none-of-it": {"topics": ["order.*", "ord"]},
        "tag": {"topics": ["order"], "filters": '{"tags": ["paid"]}'},
        "header": {"topics": ["order"], "filters": '{"headers": {"Region": "us"}}'},
        "past-it": {"topics": ["order"]},
        "gone": {"topics": ["order"]},
    }
    made = {name: await subscribe(db, name, **columns) for name, columns in wanted.items()}
    await db.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select subscription_id, 1, 0, 0, now() from subscription"
    )
    await db.execute('update checkpoint set "offset" = 1000 where subscription_id = $1', made["past-it"])
    await db.execute("update subscription set deleted_at = now() where name = 'gone'")
    transaction_id = await half_of(client, {**ORDER, "headers": {"Region": "eu", "Other": "x"}})
    assert (await client.get(f"/messages/{transaction_id}-0")).json()["deliveries"] == []
    await post_end(client, transaction_id, "commit")
    deliveries = (await client.get(f"/messages/{transaction_id}-0")).json()["deliveries"]
    assert deliveries == [
        {"subscription": name, "state": "waiting", "attempts": 0} for name in ("every", "nulls", "prefix")
    ]


async def test_a_message_waits_for_the_checkpoint_of_its_own_shard(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    mailer = await subscribe(db, "mailer", shards=3)
    await db.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select $1, 3, shard, case when shard = 1 then 1000 else 0 end, now() from generate_series(0, 2) as shard",
        mailer,
    )
    waiting = {}
    for key in (*(f"order-{number}" for number in range(8)), None):
        transaction_id = await half_of(client, {**ORDER, "key": key})
        await post_end(client, transaction_id, "commit")
        deliveries = (await client.get(f"/messages/{transaction_id}-0")).json()["deliveries"]
        assert len(deliveries) <= 1
        hashed = f"select (hashtextextended(coalesce($1, '{transaction_id}-0'), 0) & 2147483647) % 3"
        waiting[key] = (bool(deliveries), await db.fetchval(hashed, key))
    assert {(waits, shard == 1) for waits, shard in waiting.values()} == {(True, False), (False, True)}


async def test_a_star_takes_no_reserved_topic(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    for name, topics in (("every", ["*"]), ("h", ["h*"]), ("reserved", ["halfnote.*"]), ("named", ["halfnote.x"])):
        subscription = await subscribe(db, name, topics=topics)
        await db.execute(
            'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) values ($1, 1, 0, 0, now())',
            subscription,
        )
    transaction_id = await half_of(client)
    await post_end(client, transaction_id, "commit")
    # No producer can write one.
    await db.execute("update outbox set topic = 'halfnote.x'")
    deliveries = (await client.get(f"/messages/{transaction_id}-0")).json()["deliveries"]
    assert [delivery["subscription"] for delivery in deliveries] == ["named", "reserved"]


async def test_states_look_at_op_first(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    transaction_id, parked = await half_of(client), await half_of(client)
    await in_doubt(db, transaction_id)
    await in_doubt(db, parked, 2, parked_reason="nobody answers")
    shown = (await client.get(f"/transactions/{transaction_id}")).json()
    assert (shown["state"], "next_check_at" in shown) == ("in_doubt", True)
    shown = (await client.get(f"/transactions/{parked}")).json()
    assert (shown["state"], shown["parked_reason"], "next_check_at" in shown) == ("parked", "nobody answers", False)
    for each in (transaction_id, parked):
        await post_end(client, each, "rollback")
        await in_doubt_again(db, each)
        shown = (await client.get(f"/transactions/{each}")).json()
        assert shown["state"] == "rolled_back"
        assert not {"next_check_at", "parked_reason"} & set(shown)
    listed = (await client.get("/transactions", params={"state": "in_doubt"})).json()
    assert listed == {"items": [], "next_cursor": None}


async def in_doubt_again(db: Connection, transaction_id: str) -> None:
    """See to it that the row that lost the race is still there."""
    if not await db.fetchval("select true from check_back where transaction_id = $1", UUID(transaction_id)):
        await in_doubt(db, transaction_id)


async def test_unknown_ids_and_gone_days(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    never = uuid7(runtime.clock.now())
    for path in (f"/transactions/{never}", f"/messages/{never}-0"):
        assert (await client.get(path)).json()["type"] == "/problems/transaction-unknown"
    transaction_id = await half_of(client)
    for message_id in (f"{transaction_id}-1", f"{transaction_id}-x", "order", f"{transaction_id}-0%00"):
        answer = await client.get(f"/messages/{message_id}")
        assert (answer.status_code, answer.json()["type"]) == (404, "/problems/message-unknown")
    await db.execute("update day set state = 'gone', archive = 's3://archive/day' where day = current_date")
    for path in (f"/transactions/{never}", f"/messages/{never}-0"):
        answer = await client.get(path)
        assert (answer.status_code, answer.json()["archive"]) == (410, "s3://archive/day")


async def test_a_json_body_comes_back_verbatim(client: httpx.AsyncClient, group: str) -> None:
    raw = b'{ "z":1.0,\t"a" : [1e400, "\\u00e9", 12345678901234567890123], "a":2 }'
    made = await client.post(
        "/half",
        content=b'{"producer_group":"shop","messages":[{"topic":"order","body":%s},{"topic":"o","body":null}]}' % raw,
        headers={"content-type": "application/json"},
    )
    transaction_id = made.json()["transaction_id"]
    assert b'"body":' + raw in (await client.get(f"/messages/{transaction_id}-0")).content
    null = (await client.get(f"/messages/{transaction_id}-1")).json()
    assert (null["body"], null["state"], null["transaction_id"]) == (None, "half", transaction_id)


@pytest.mark.parametrize(
    ("content", "content_type"),
    [(b"\x00\xff", None), (b"<a/>", "text/xml"), (b"{broken", "application/json"), (b'"\xff"', "application/json")],
)
async def test_other_bodies_come_back_as_base64(
    client: httpx.AsyncClient, group: str, content: bytes, content_type: str | None
) -> None:
    encoded = base64.b64encode(content).decode()
    transaction_id = await half_of(client, {"topic": "file", "body_base64": encoded, "content_type": content_type})
    shown = (await client.get(f"/messages/{transaction_id}-0")).json()
    assert (shown["body_base64"], "body" in shown) == (encoded, False)


def type_of(value: int | str | None) -> str:
    if value is None:
        return "text[]"
    return "text" if isinstance(value, str) else "bigint" if value > 1000 else "int"


@pytest.mark.parametrize("generic", [True, False])
@pytest.mark.parametrize(
    ("statement", "more"),
    [
        (history.OWNER, (0,)),
        (history.STORED_MESSAGES, ()),
        (history.RECORD, ()),
        (history.PUBLISHED, ()),
        (LATEST_ATTEMPTS, (HIGHEST_ID, 1000)),
        (EARLIER_ATTEMPTS, (HIGHEST_ID, 1000)),
        (DELIVERIES, (-1, "", 0, 0, 99, None, None, 1000)),
        (history.REDELIVERIES, (1000,)),
        (MESSAGE_BODY, (0,)),
        (lists.TRANSACTION_STATE, ()),
    ],
)
async def test_a_transaction_is_read_from_its_own_day(
    full: Connection, statement: str, more: tuple[int | str | None, ...], generic: bool
) -> None:
    await subscribe(full, "mailer")
    await full.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) '
        "select subscription_id, 1, 0, 0, now() from subscription"
    )
    transaction_id: UUID = await full.fetchval("select transaction_id from op order by transaction_id limit 1")
    types = ("uuid", *map(type_of, more))
    found = big(await scans(full, statement, types, (transaction_id, *more), generic=generic))
    assert {scan.table.rpartition("_")[2] for scan in found if scan.rows} <= {f"{id_day(transaction_id):%Y%m%d}"}
    assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows]
    assert sum(scan.rows for scan in found) < 10
