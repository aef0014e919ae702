"""Requests for replays: the part of the log that they cover, refusals, their states, and their end."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from app.store.subscriptions.replays import COUNT, oldest, running
from tests.coordinator.test_statement_plans import full
from tests.relay.test_plans import ends
from tests.support.check_responder import Responder
from tests.support.days import go_to, long_ago
from tests.support.explain import big, scans
from tests.support.relay_stepping import order, publish, subscribe, turn_until

__all__ = ["full"]

SHAPE: dict[str, Any] = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}


@pytest.fixture
async def sent(client: httpx.AsyncClient, group: str) -> list[int]:
    """The offsets of ten messages in the log, and a subscription that starts after them."""
    offsets = await publish(client, *(order(number) for number in range(10)))
    assert (await client.put("/subscriptions/mailer", json=SHAPE)).status_code == 201
    return offsets


@pytest.fixture
async def relay(runtime: Runtime) -> AsyncIterator[Relay]:
    made = Relay(runtime)
    yield made
    await made.drain(runtime)


async def ask(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    fields = {name.rstrip("_"): value for name, value in fields.items()}
    return await client.post("/subscriptions/mailer/replay", json=fields)


async def committed_at(db: Connection, offset: int) -> datetime:
    at: datetime = await db.fetchval('select committed_at from outbox where "offset" = $1', offset)
    return at


async def test_from_an_offset_to_the_newest(client: httpx.AsyncClient, sent: list[int], db: Connection) -> None:
    answer = await ask(client, from_={"offset": sent[3]}, reason="lost", actor="dana")
    assert answer.status_code == 202
    made = answer.json()
    assert (made["after"], made["until"], made["offset"]) == (sent[3] - 1, sent[-1], sent[3] - 1)
    assert (made["state"], made["reason"], made["actor"], made["filters"]) == ("running", "lost", "dana", None)
    [found] = await running(db)
    assert (found.replay_id, found.after, found.until) == (made["replay_id"], sent[3] - 1, sent[-1])


async def test_earliest_and_until(client: httpx.AsyncClient, sent: list[int]) -> None:
    made = (await ask(client, from_="earliest", until={"offset": sent[4]})).json()
    assert (made["after"], made["until"]) == (sent[0] - 1, sent[4])


async def test_times_take_what_was_committed_then_and_up_to_a_second_more(
    client: httpx.AsyncClient, sent: list[int], db: Connection
) -> None:
    # One message each 10 s.
    first = await committed_at(db, sent[0])
    for number, offset in enumerate(sent):
        at = first + timedelta(seconds=10 * number)
        await db.execute('update outbox set committed_at = $1 where "offset" = $2', at, offset)
    wanted = {"time": (first + timedelta(seconds=20)).isoformat()}
    until = {"time": (first + timedelta(seconds=59.5)).isoformat()}
    made = (await ask(client, from_=wanted, until=until)).json()
    assert (made["after"], made["until"]) == (sent[1], sent[6])
    made = (await ask(client, from_={"time": "2020-01-01T00:00:00Z"})).json()
    assert (made["after"], made["until"]) == (sent[0] - 1, sent[-1])


async def test_the_first_and_the_last_time_of_all_are_times_like_others(
    client: httpx.AsyncClient, sent: list[int]
) -> None:
    first, last = {"time": "0001-01-01T00:00:00Z"}, {"time": "9999-12-31T23:59:59Z"}
    made = (await ask(client, from_=first, until=last)).json()
    assert (made["after"], made["until"]) == (sent[0] - 1, sent[-1])
    assert (await ask(client, from_=last)).json()["field"] == "from"
    assert (await ask(client, from_="earliest", until=first)).json()["field"] == "until"


async def test_what_is_refused_says_why(client: httpx.AsyncClient, sent: list[int], db: Connection) -> None:
    async def refusal(**fields: Any) -> tuple[int, str, str | None]:
        answer = await ask(client, **fields)
        return answer.status_code, answer.json()["type"].rpartition("/")[2], answer.json().get("field")

    head = sent[-1]
    assert await refusal(from_={"offset": head + 1}) == (422, "invalid", "from")
    assert await refusal(from_={"time": "2099-01-01T00:00:00Z"}) == (422, "invalid", "from")
    assert await refusal(from_={"offset": sent[5]}, until={"offset": sent[2]}) == (422, "invalid", "until")
    assert await refusal(from_={"offset": sent[5]}, until={"offset": head + 1}) == (422, "invalid", "until")
    assert await refusal(until={"offset": head}) == (422, "invalid", "from")
    assert await refusal(from_="latest") == (422, "invalid", "from")
    assert await refusal(from_={"offset": sent[0]}, filters={"tags": []}) == (422, "invalid", "filters.tags")
    assert await refusal(from_={"offset": sent[0]}, filters={"topic": ["x"]}) == (422, "invalid", "filters.topic")
    answer = await client.post("/subscriptions/none/replay", json={"from": "earliest"})
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/subscription-unknown")
    assert await running(db) == []


async def test_a_dry_run_counts_and_begins_nothing(client: httpx.AsyncClient, sent: list[int], db: Connection) -> None:
    await publish(client, {"topic": "refund", "body": 1}, {**order(7), "tag": "paid", "key": "k"})
    put = {**SHAPE, "filters": {"tags": ["created", "paid"]}}
    shape = SHAPE
    last = await db.fetchval('select max("offset") from outbox')
    for subscribed, fields, messages in (
        (shape, {"from_": "earliest"}, 11),
        (shape, {"from_": {"offset": sent[3]}, "until": {"offset": sent[5]}}, 3),
        (shape, {"from_": "earliest", "filters": {"tags": ["paid"]}}, 1),
        (shape, {"from_": "earliest", "filters": {"keys": ["k"]}}, 1),
        (shape, {"from_": "earliest", "filters": {"topics": ["refund"]}}, 0),
        (put, {"from_": "earliest"}, await db.fetchval("select count(*) from outbox where tag in ('created', 'paid')")),
    ):
        assert (await client.put("/subscriptions/mailer", json=subscribed)).status_code == 200
        answer = await ask(client, dry_run=True, **fields)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert (found["dry_run"], found["subscription"], found["exact"]) == (True, "mailer", True)
        assert found["messages"] == messages, fields
        assert found["until"] == (sent[5] if "until" in fields else last)
    for refused in ({"from_": {"offset": last + 1}}, {"from_": "latest"}, {"from_": "earliest", "dry_run": "yes"}):
        assert (await ask(client, **{"dry_run": True, **refused})).status_code == 422
    assert (await ask(client, from_="earliest", dry_run=False)).status_code == 202
    assert len(await running(db)) == 1
    assert await db.fetchval("select count(*) from audit where what = 'subscription.replay'") == 1


async def test_a_day_that_is_being_removed_is_not_counted(
    client: httpx.AsyncClient, runtime: Runtime, sent: list[int], db: Connection
) -> None:
    """A replay skips its messages."""
    at = long_ago(2)
    await go_to(runtime, db, at)
    await publish(client, order(10), order(11))
    assert (await ask(client, from_="earliest", dry_run=True)).json()["messages"] == len(sent) + 2
    await db.execute("update day set state = 'archiving' where day = $1", at.date())
    assert (await ask(client, from_="earliest", dry_run=True)).json()["messages"] == len(sent)


async def test_a_long_part_is_counted_up_to_a_limit(full: Connection) -> None:
    low, high = await ends(full)
    most = 500
    assert high - low > most
    values = (low, high, ["order"], None, None, None, None, most + 1)
    found = big(await scans(full, COUNT, ("bigint", "bigint", *["text[]"] * 5, "bigint"), values, generic=False))
    assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows]
    assert {scan.table.partition("_2")[0] for scan in found if scan.rows} == {"outbox"}
    assert sum(scan.rows for scan in found) <= most + 100
    row = await full.fetchrow(COUNT, *values)
    assert row is not None
    assert row["looked_at"] == most + 1


async def test_a_part_that_left_the_database_is_refused_with_the_oldest_that_is_there(
    client: httpx.AsyncClient, sent: list[int], db: Connection
) -> None:
    await db.execute('delete from outbox where "offset" < $1', sent[4])
    answer = await ask(client, from_={"offset": sent[2]})
    assert (answer.status_code, answer.json()["type"], answer.json()["oldest"]) == (410, "/problems/log-gone", sent[4])
    assert (await ask(client, from_={"offset": sent[4]})).status_code == 202
    await db.execute(
        "update day set state = 'archiving' from outbox where day.low <= transaction_id and day.high > transaction_id"
    )
    assert await oldest(db) is None
    answer = await ask(client, from_="earliest")
    assert (answer.status_code, answer.json()["field"]) == (422, "from")


async def test_lists_show_the_newest_first_in_pages(client: httpx.AsyncClient, sent: list[int]) -> None:
    made = [(await ask(client, from_={"offset": offset})).json()["replay_id"] for offset in sent[:3]]
    path = "/subscriptions/mailer/replays"
    first = (await client.get(path, params={"limit": 2})).json()
    assert [item["replay_id"] for item in first["items"]] == [made[2], made[1]]
    second = (await client.get(path, params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert ([item["replay_id"] for item in second["items"]], second["next_cursor"]) == ([made[0]], None)
    assert (await client.get("/subscriptions/mailer")).json()["replays"] == made
    await client.put("/subscriptions/other", json=SHAPE)
    assert (await client.get("/subscriptions/other/replays")).json()["items"] == []
    assert (await client.get(f"/subscriptions/other/replays/{made[0]}")).status_code == 404
    assert (await client.delete(f"/subscriptions/other/replays/{made[0]}")).status_code == 404


async def test_only_so_many_run_at_once(client: httpx.AsyncClient, sent: list[int]) -> None:
    made = [await ask(client, from_="earliest", until={"offset": offset}) for offset in sent]
    assert [answer.status_code for answer in made] == [202] * 10
    refused = await ask(client, from_={"offset": sent[1]})
    assert (refused.json()["type"], refused.json()["limit"]) == ("/problems/too-many-replays", 10)
    await client.delete(f"/subscriptions/mailer/replays/{made[0].json()['replay_id']}")
    assert (await ask(client, from_={"offset": sent[1]})).status_code == 202


async def test_the_same_one_does_not_run_twice(client: httpx.AsyncClient, sent: list[int], db: Connection) -> None:
    """A caller without an answer repeats the request."""
    part = {"from_": {"offset": sent[1]}, "until": {"offset": sent[3]}, "filters": {"tags": ["b", "a"]}}
    answers = await asyncio.gather(*(ask(client, **part) for _ in range(2)))
    made, refused = sorted((one.json() for one in answers), key=lambda one: "detail" in one)
    assert sorted(one.status_code for one in answers) == [202, 409]
    assert (refused["type"], refused["until"]) == ("/problems/replay-running", sent[3])
    assert refused["replay_id"] == made["replay_id"]
    assert f"Replay {made['replay_id']} of `mailer`" in refused["detail"]
    others = ({"from_": {"offset": sent[0]}}, {"until": {"offset": sent[4]}}, {"filters": {"tags": ["a"]}})
    for other in (*others, {"filters": None}):
        assert (await ask(client, **{**part, **other})).status_code == 202
    await client.put("/subscriptions/other", json=SHAPE)
    same = {"from": part["from_"], "until": part["until"], "filters": part["filters"]}
    assert (await client.post("/subscriptions/other/replay", json=same)).status_code == 202
    await client.delete(f"/subscriptions/mailer/replays/{made['replay_id']}")
    assert (await ask(client, **part)).status_code == 202
    assert await db.fetchval("select count(*) from audit where what = 'subscription.replay'") == 7


async def test_the_newest_message_of_a_repeated_request_may_be_newer(
    client: httpx.AsyncClient, sent: list[int]
) -> None:
    made = (await ask(client, from_="earliest")).json()
    [newest] = await publish(client, order(11))
    refused = (await ask(client, from_="earliest")).json()
    assert (refused["type"], refused["replay_id"]) == ("/problems/replay-running", made["replay_id"])
    after = made["until"] + 1
    assert (await ask(client, from_={"offset": after})).json()["until"] == newest
    assert (await ask(client, from_="earliest", until={"offset": newest})).status_code == 202


async def test_a_cancelled_one_leaves_nothing_to_retry(
    client: httpx.AsyncClient, sent: list[int], db: Connection, runtime: Runtime
) -> None:
    made = (await ask(client, from_="earliest")).json()["replay_id"]
    await db.execute(
        """insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, attempts,
             due_at, leased_until)
           select p.subscription_id, p.replay_id, o.transaction_id, 0, o."offset", o.topic, 1, now(),
             case when o."offset" = $1 then $2::timestamptz + interval '1 min' end from replay p, outbox o""",
        sent[0],
        runtime.clock.now(),
    )
    path = f"/subscriptions/mailer/replays/{made}"
    assert (await client.get(path)).json()["retrying"] == 10
    assert (await client.delete(path)).status_code == 204
    shown = (await client.get(path)).json()
    # A worker holds one of them and settles it.
    assert (shown["state"], shown["retrying"]) == ("cancelled", 1)
    assert shown["ended_at"] is not None
    assert (await client.delete(path)).status_code == 204
    assert (await client.get("/subscriptions/mailer")).json()["replays"] == []
    await db.execute("update replay set state = 'done'")
    answer = await client.delete(path)
    assert (answer.status_code, answer.json()["type"], answer.json()["state"]) == (409, "/problems/replay-over", "done")


async def test_deleting_a_subscription_cancels_its_replays(
    client: httpx.AsyncClient, sent: list[int], db: Connection
) -> None:
    await ask(client, from_="earliest")
    await client.delete("/subscriptions/mailer")
    assert await db.fetchval("select state from replay") == "cancelled"
    assert await running(db) == []


@pytest.mark.parametrize("shards", [1, 3])
async def test_replayed_messages_are_delivered_once_more(
    client: httpx.AsyncClient, runtime: Runtime, relay: Relay, db: Connection, group: str, shards: int
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, shards=shards)
        tags = ["a", "b", None]
        sent = await publish(client, *(order(number, tag=tags[number % 3]) for number in range(30)))
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 30 from receipt"))
        receiver.calls.clear()
        asked = {"from": {"offset": sent[3]}, "until": {"offset": sent[26]}, "filters": {"tags": ["a", "b"]}}
        made = (await client.post("/subscriptions/mailer/replay", json=asked)).json()
        path = f"/subscriptions/mailer/replays/{made['replay_id']}"

        async def done() -> bool:
            runtime.clock.offset_s += 1
            return bool((await client.get(path)).json()["state"] == "done")

        await turn_until(relay, runtime, done)
        shown = (await client.get(path)).json()
    expected = [offset for number, offset in enumerate(sent) if 3 <= number <= 26 and number % 3 < 2]
    received = sorted(int(call.headers["halfnote-offset"]) for call in receiver.calls)
    assert received == expected
    assert {call.headers["halfnote-replay"] for call in receiver.calls} == {str(made["replay_id"])}
    assert (shown["delivered"], shown["retrying"], shown["dead"], shown["offset"]) == (len(expected), 0, 0, sent[26])
