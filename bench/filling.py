"""Store halves and committed messages before a run, in the same rows as the services, but in bulk."""

import os
import time
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from app.database.advisory_locks import AdvisoryLock
from app.database.notifier import CHANNEL, NOTIFY
from bench.payload import GROUP, IDS_A_MS, TOPIC, as_uuids, half_body, message_of
from bench.stage import connected

# The number of keys of committed messages: enough that each of 64 shards gets a share of them.
KEYS = 1000
# The rows of one statement: few enough that no statement sorts on disk.
AT_A_TIME = 100_000

# Under the offset lock (see RECORD_ENDS), so that no offset becomes visible before a lower one.
LOCK = f"select pg_advisory_xact_lock({AdvisoryLock.OFFSET})"
# UUIDv7 with random tails, IDS_A_MS per millisecond; $1: the first ms; $2: the first number; $3: how many; $4: a salt
# that makes the ids unique; $9: how many keys. The first check is due a day later, as in all benchmarks, because a
# sweep over all rows at once is no part of the cost of a delivery.
COMMITTED = f"""
with made as materialized (
  select n, to_timestamp(ms / 1000.0) as at, 'customer-' || n % $9::int as key,
    overlay(overlay(left(lpad(to_hex(ms), 12, '0') || md5(n || $4), 32) placing '7' from 13) placing '8' from 17)::uuid
      as id
  from (select n, $1::bigint + n / {IDS_A_MS} as ms from generate_series($2::int, $2 + $3::int - 1) as n) t
), halves as (
  insert into half (transaction_id, position, producer_group, topic, key, content_type, body, body_digest, born_at,
    first_check_at, digest)
  select id, 0, $5, $6::text, key, 'application/json', $7, $8, at, at + interval '1 day', $8 from made
), ops as (
  insert into op (transaction_id, verdict, source, decided_at) select id, 1, 0, at from made
)
insert into outbox (transaction_id, position, "offset", topic, key, committed_at)
select id, 0, nextval('outbox_offset'), $6, key, at from (select * from made order by n) m
"""


async def fill_committed(dsn: str, topic: str, count: int, *, keys: int = KEYS) -> None:
    """Publish `count` messages of about 230 bytes at the same moment, each in its own transaction, over `keys` keys."""
    body = message_of(half_body())
    first, nonce = time.time_ns() // 1_000_000 - count // IDS_A_MS, os.urandom(8).hex()
    async with connected(dsn) as connection, connection.transaction():
        await connection.execute(LOCK)
        for at in range(0, count, AT_A_TIME):
            rows = min(AT_A_TIME, count - at)
            known = (GROUP, topic, body, sha256(body).digest())
            await connection.execute(COMMITTED, first, at, rows, nonce, *known, keys, timeout=300)
        # The publishing service does the same. Postgres sends the notification when the database transaction commits.
        await connection.execute(NOTIFY, CHANNEL, topic)


async def fill_ours(dsn: str, ids: list[str]) -> None:
    """Store halves in bulk, in the same rows as `/half`."""
    body = message_of(half_body())
    digest, now = sha256(body).digest(), datetime.now(UTC)
    later = now + timedelta(days=1)
    columns = (
        "transaction_id position producer_group topic key content_type body body_digest born_at first_check_at digest"
    )
    async with connected(dsn) as connection:
        await connection.copy_records_to_table(
            "half",
            records=[
                (id_, 0, GROUP, TOPIC, "customer-77", "application/json", body, digest, now, later, digest)
                for id_ in as_uuids(ids)
            ],
            columns=columns.split(),
        )


async def fill_naive(dsn: str, ids: list[str]) -> None:
    """Store halves in bulk, in the same rows as the naive service."""
    messages = half_body().partition(b'"messages":')[2].removesuffix(b"}").decode()
    async with connected(dsn) as connection:
        await connection.copy_records_to_table(
            "naive",
            records=[(id_, GROUP, "half", messages) for id_ in as_uuids(ids)],
            columns=["transaction_id", "producer_group", "state", "messages"],
        )
