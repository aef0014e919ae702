"""Transactions of past days, for tests of upkeep."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import httpx

from app.database.connection import Connection
from app.ids import day_bounds
from app.migrate import ensure_days
from app.runtime.state import Runtime
from app.store.retention.days import partition_name

ORDER = {"topic": "order", "key": "order-1030", "tag": "created", "headers": {"vip": "yes"}, "body": {"order": 1030}}


async def go_to(runtime: Runtime, db: Connection, at: datetime) -> None:
    """Set the service's clock, and create the day of that time."""
    runtime.clock.fixed = at
    await ensure_days(db, at, days_ahead=0)


def long_ago(days: int) -> datetime:
    """Return noon of a day before today."""
    today = datetime.now(UTC).date() - timedelta(days=days)
    return datetime(today.year, today.month, today.day, 12, tzinfo=UTC)


async def post_half(client: httpx.AsyncClient, *messages: dict[str, Any], group: str = "shop") -> str:
    """Post a half of order 1030, or of other messages; return its id."""
    answer = await client.post("/half", json={"producer_group": group, "messages": messages or [ORDER]})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["transaction_id"])


async def post_end(client: httpx.AsyncClient, transaction_id: str, verdict: str = "commit") -> httpx.Response:
    """Post the end of a transaction of the group `shop`."""
    return await client.post(
        "/end", json={"transaction_id": transaction_id, "producer_group": "shop", "verdict": verdict}
    )


async def post_transaction(client: httpx.AsyncClient, *messages: dict[str, Any], verdict: str = "commit") -> str:
    """Post a half and its end; return the id."""
    transaction_id = await post_half(client, *messages)
    answer = await post_end(client, transaction_id, verdict)
    assert answer.status_code == 200, answer.text
    return transaction_id


async def write_transactions(db: Connection, at: datetime, count: int) -> None:
    """Write committed transactions of one message each, with the offsets from 1, in one statement."""
    await db.execute(
        """
        with ids as (
          select n, (lpad(to_hex((extract(epoch from $1::timestamptz) * 1000)::bigint), 12, '0') || '70008'
            || lpad(to_hex(n), 15, '0'))::uuid as id
          from generate_series(1, $2::int) n
        ), halves as (
          insert into half (transaction_id, position, producer_group, topic, content_type, body, body_digest, born_at,
            first_check_at, digest)
          select id, 0, 'shop', 'order', 'application/json', '1', '', $1, $1, '' from ids
        ), ops as (
          insert into op (transaction_id, verdict, source, decided_at) select id, 1, 0, $1 from ids
        )
        insert into outbox (transaction_id, position, "offset", topic, committed_at)
        select id, 0, n, 'order', $1 from ids
        """,
        at,
        count,
    )


async def partitions_of(db: Connection, day: date) -> dict[str, bool]:
    """Return which of the day's tables exist, and whether each is attached."""
    names = [partition_name(table, day) for table in ("half", "op", "outbox", "receipt", "attempt")]
    rows = await db.fetch(
        "select c.relname, exists (select from pg_inherits i where i.inhrelid = c.oid) as attached "
        "from pg_class c where c.relname = any($1)",
        names,
    )
    return {row["relname"]: row["attached"] for row in rows}


async def subscribe(db: Connection, name: str, *topics: str, after: int = 0, **columns: Any) -> int:
    """Write a subscription's row and checkpoint; return its id."""
    row = {"filters": None, "state": "active", "deleted_at": None, **columns}
    subscription_id: int = await db.fetchval(
        "insert into subscription (name, topics, filters, destination, secrets, start, max_in_flight, timeout_s, "
        "retry, state, deleted_at, created_at, updated_at, "
        "started_after, matches_since) "
        "values ($1, $2, $3, '{}', '[]', '\"latest\"', 1, 1, '{}', $4, $5, now(), now(), 0, now()) "
        "returning subscription_id",
        name,
        list(topics),
        row["filters"],
        row["state"],
        row["deleted_at"],
    )
    await db.execute(
        'insert into checkpoint (subscription_id, shards, shard, "offset", moved_at) values ($1, 1, 0, $2, now())',
        subscription_id,
        after,
    )
    return subscription_id


async def park(db: Connection, transaction_id: str) -> None:
    """Write the row of a parked transaction."""
    await db.execute(
        "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at, parked_at) "
        "values ($1, 'shop', 2, now(), now(), now())",
        transaction_id,
    )


async def all_delivered(db: Connection) -> None:
    """Move every checkpoint to the end of the log."""
    await db.execute('update checkpoint set "offset" = (select coalesce(max("offset"), 0) from outbox)')


def lowest(day: date) -> str:
    """Return the lowest id of a day."""
    return str(day_bounds(day)[0])
