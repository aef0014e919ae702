"""The status of a subscription: lag, rates, breaker and holders, with one shard or several."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.relay.log import HASH
from tests.support.relay_stepping import order, publish

SHARDS = 4
OF_SHARD = f'select "offset", {HASH.format("o")} % {SHARDS} as shard from outbox o order by 1'


async def put_subscription(client: httpx.AsyncClient, **fields: Any) -> None:
    subscription = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}, **fields}
    assert (await client.put("/subscriptions/mailer", json=subscription)).is_success


async def get_subscription(client: httpx.AsyncClient) -> dict[str, Any]:
    answer: dict[str, Any] = (await client.get("/subscriptions/mailer")).json()
    return answer


async def retry(db: Connection, offset: int, **columns: Any) -> None:
    """Insert a retry of a message of the log, due a second ago, with these further columns."""
    names = "".join(f", {name}" for name in columns)
    marks = "".join(f", ${number}" for number in range(2, len(columns) + 2))
    await db.execute(
        f"""insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts,
              due_at{names})
            select s.subscription_id, o.transaction_id, o.position, o."offset", o.topic, o.key, 0,
              now() - interval '1 s'{marks}
            from subscription s, outbox o where o."offset" = $1""",
        offset,
        *columns.values(),
    )


async def receive(db: Connection, offset: int, replay: int) -> None:
    """Record that a message of the log was delivered."""
    await db.execute(
        """insert into receipt select o.transaction_id, o.position, s.subscription_id, o."offset", 'delivered', 1,
             now(), 1, 200, null, now(), $2 from subscription s, outbox o where o."offset" = $1""",
        offset,
        replay,
    )


async def test_lag_counts_what_no_shard_has_settled(client: httpx.AsyncClient, db: Connection, group: str) -> None:
    await put_subscription(client, shards=SHARDS)
    sent = await publish(client, *(order(number) for number in range(40)))
    await publish(client, {"topic": "other", "body": 1})
    assert (await get_subscription(client))["lag"]["messages"] == 40
    of_shard: dict[int, list[int]] = {number: [] for number in range(SHARDS)}
    for offset, shard in await db.fetch(OF_SHARD):
        if offset in sent:
            of_shard[shard].append(offset)
    assert min(map(len, of_shard.values())) > 3
    # Shard 1 is at the end without receipts, as after a header filter that matched nothing; shard 2 is halfway.
    middle = of_shard[2][len(of_shard[2]) // 2]
    for shard, offset in ((1, sent[-1]), (2, middle)):
        await db.execute('update checkpoint set "offset" = $2 where shard = $1', shard, offset)
    # Shard 3 has settled one message after its checkpoint and has one in retry.
    await retry(db, of_shard[3][0], first_at=await db.fetchval("select now()"))
    await receive(db, of_shard[3][1], 0)
    # A receipt of a replay does not count as live delivery.
    await receive(db, of_shard[3][2], 7)
    answer = await get_subscription(client)
    left = len(of_shard[0]) + sum(offset > middle for offset in of_shard[2]) + len(of_shard[3]) - 2
    assert (answer["lag"]["messages"], answer["checkpoint"]["offset"], answer["retrying"]) == (left, 0, 1)
    assert [place["offset"] for place in answer["places"]] == [0, sent[-1], middle, 0]


async def test_only_patterns_of_reserved_topics_count_operational_messages(
    client: httpx.AsyncClient, db: Connection, group: str
) -> None:
    [first, *_] = await publish(client, order(1), order(2), order(3))
    await db.execute("update outbox set topic = 'halfnote.finding' where \"offset\" > $1", first)
    for topics, expected in ((["*"], 1), (["order", "h*"], 1), (["halfnote.*"], 2), (["*", "halfnote.f*"], 3)):
        await put_subscription(client, topics=topics)
        await db.execute('update checkpoint set "offset" = 0')
        assert (await get_subscription(client))["lag"]["messages"] == expected, topics


async def test_rates_add_up_while_they_are_fresh(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, group: str
) -> None:
    await put_subscription(client, shards=2)
    assert (await get_subscription(client))["rates"] == {"delivered_per_s": 0, "failed_per_s": 0}
    await db.execute(
        "update checkpoint set delivered_per_s = 10 + shard, failed_per_s = shard, rated_at = $1", runtime.clock.now()
    )
    assert (await get_subscription(client))["rates"] == {"delivered_per_s": 21, "failed_per_s": 1}
    runtime.clock.offset_s += 16
    assert (await get_subscription(client))["rates"] == {"delivered_per_s": 0, "failed_per_s": 0}


NEVER_OPENED = {"opened_at": None, "because": None, "paused_until": None}


async def test_an_open_breaker_is_shown_everywhere(client: httpx.AsyncClient, db: Connection, runtime: Runtime) -> None:
    await put_subscription(client, shards=2)
    answer = await get_subscription(client)
    assert (answer["state"], answer["breaker"]) == ("active", {"state": "closed", **NEVER_OPENED})
    now = runtime.clock.now()
    await db.execute("update checkpoint set opened_at = $1, opened_because = 'answered 500' where shard = 1", now)
    answer = await get_subscription(client)
    assert (answer["state"], answer["state_reason"]) == ("open", "answered 500")
    assert (answer["breaker"]["state"], answer["breaker"]["because"]) == ("open", "answered 500")
    [listed] = (await client.get("/subscriptions")).json()["items"]
    assert (listed["state"], listed["state_reason"]) == ("open", "answered 500")
    paused = (await client.post("/subscriptions/mailer/pause")).json()
    assert (paused["state"], paused["state_reason"]) == ("paused", None)
    assert (await get_subscription(client))["breaker"]["state"] == "open"
    assert (await client.post("/subscriptions/mailer/resume")).json()["state"] == "open"
    await db.execute("update checkpoint set opened_at = null")
    assert (await get_subscription(client))["state"] == "active"


async def test_holders_are_those_whose_lease_has_not_expired(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    await put_subscription(client, shards=3)
    number, now = await db.fetchval("select subscription_id from subscription"), runtime.clock.now()
    until = now + timedelta(seconds=10)
    leases = [("0", "one", until), ("1", "two", now - timedelta(seconds=1)), ("2", "", until)]
    for shard, owner, expires_at in leases:
        await db.execute("insert into lease values ($1, $2, 1, $3)", f"relay:{number}:3:{shard}", owner, expires_at)
    await db.execute("insert into lease values ($1, 'old', 1, $2)", f"relay:{number}:1:0", until)
    places = (await get_subscription(client))["places"]
    assert [(place["shard"], place["holder"]) for place in places] == [(0, "one"), (1, None), (2, None)]
    assert places[0]["held_until"] is not None


@pytest.mark.parametrize(("ordered", "expected"), [("key", (2, 1)), ("none", (3, 0))])
async def test_messages_that_wait_for_their_key_are_counted_separately(
    client: httpx.AsyncClient, db: Connection, group: str, ordered: str, expected: tuple[int, int]
) -> None:
    await put_subscription(client, ordered=ordered)
    sent = await publish(client, *(order(1) for _ in range(3)))
    await retry(db, sent[0], first_at=await db.fetchval("select now()"), last_error="answered 500")
    await retry(db, sent[1])
    await retry(db, sent[2])
    await db.execute("update delivery_retry set due_at = now() + interval '1 h' where \"offset\" = $1", sent[2])
    answer = await get_subscription(client)
    assert (answer["retrying"], answer["held"]) == expected
    assert (answer["lag"]["messages"], answer["last_error"]) == (0, "answered 500")


async def test_workers_carry_out_a_change_of_the_number_of_shards(client: httpx.AsyncClient, db: Connection) -> None:
    await put_subscription(client)
    await put_subscription(client, shards=3)
    answer = await get_subscription(client)
    assert (answer["shards"], len(answer["places"])) == (3, 1)
    assert await db.fetchval("select count(*) from checkpoint") == 1
