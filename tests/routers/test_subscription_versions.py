"""Every change of what a subscription takes and promises leaves a row of its history, in the same transaction."""

from typing import Any

import httpx

from app.database.connection import Connection
from app.store.subscriptions import subscriptions as store

WEBHOOK: dict[str, Any] = {"type": "webhook", "url": "http://127.0.0.1:9/orders"}
KEPT = "select topics, filters::text, state, shards, expire_after_s, deleted_at is not null as deleted"
HISTORY = f"{KEPT} from subscription_version order by version_id"
# The history says of each subscription what its row says, and nothing in it is in the future.
SAME = """
select count(*) from (
  select distinct on (subscription_id) * from subscription_version order by subscription_id, at desc, version_id desc
) v full join subscription s using (subscription_id)
where (v.topics, v.filters, v.state, v.shards, v.started_after, v.deleted_at)
  is distinct from (s.topics, s.filters, s.state, s.shards, s.started_after, s.deleted_at)
  or v.at > clock_timestamp() + interval '1 s'
"""


async def put(client: httpx.AsyncClient, **fields: Any) -> None:
    answer = await client.put("/subscriptions/mailer", json={"topics": ["order"], "destination": WEBHOOK, **fields})
    assert answer.is_success, answer.text


async def test_each_change_of_a_subscription_leaves_a_version(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client)
    # What says nothing about deliveries leaves no version: the same again, and other secrets.
    await put(client)
    await client.post("/subscriptions/mailer/rotate-secret")
    await put(client, topics=["order", "bill.*"], filters={"tags": ["red"]}, expire_after_s=3600, shards=2)
    await client.post("/subscriptions/mailer/pause")
    await client.post("/subscriptions/mailer/pause")
    await client.post("/subscriptions/mailer/resume")
    resumed = await store.one(db, "mailer")
    assert resumed is not None
    assert await store.disable(db, resumed, "410", (await db.fetchval("select clock_timestamp()")))
    await client.delete("/subscriptions/mailer")
    wide: tuple[Any, ...] = (["order", "bill.*"], '{"tags": ["red"]}')
    assert [tuple(row) for row in await db.fetch(HISTORY)] == [
        (["order"], None, "active", 1, None, False),
        (*wide, "active", 2, 3600.0, False),
        (*wide, "paused", 2, 3600.0, False),
        (*wide, "active", 2, 3600.0, False),
        (*wide, "disabled", 2, 3600.0, False),
        (*wide, "disabled", 2, 3600.0, True),
    ]
    assert await db.fetchval(SAME) == 0


async def test_a_change_that_is_rolled_back_leaves_no_version(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client)
    change = db.transaction()
    await change.start()
    await db.execute("update subscription set topics = '{other}'")
    assert await db.fetchval("select count(*) from subscription_version") == 2
    await change.rollback()
    assert await db.fetchval("select count(*) from subscription_version") == 1


async def test_a_change_by_hand_leaves_a_version_too(client: httpx.AsyncClient, db: Connection) -> None:
    await put(client)
    await db.execute("update subscription set state = 'paused', matches_since = now() - interval '9 days'")
    assert [row["state"] for row in await db.fetch(HISTORY)] == ["active", "paused"]
    # A row that is deleted by hand leaves its history.
    await db.execute("delete from subscription")
    assert len(await db.fetch(HISTORY)) == 2
