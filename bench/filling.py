"""Halves and committed messages that are there before a run: stored as the services store them, without their cost."""

import os
import time
from datetime import UTC, datetime, timedelta
from hashlib import sha256

from app.wakeups import CHANNEL, NOTIFY
from bench.payload import GROUP, IDS_A_MS, TOPIC, as_uuids, half_body, message_of
from bench.stage import connected

# Keys of committed messages: enough that each of 64 shards gets its part of them.
KEYS = 1000
# Rows of one statement, so that none sorts on disk.
AT_A_TIME = 100_000

# Under the lock of the offset (see RECORD_ENDS), so that no offset of these shows before a smaller one.
LOCK = "select pg_advisory_xact_lock(7001)"
# UUIDv7 with random tails, IDS_A_MS to a millisecond; $1 the first ms, $2 from and $3 how many, $4 what makes them new.
# The first check is a day away, as everywhere here: a sweep over all at once is no part of a delivery's cost.
COMMITTED = f"""
with made as materialized (
  select n, to_timestamp(ms / 1000.0) as at, 'customer-' || n % {KEYS} as key,
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


async def fill_committed(dsn: str, topic: str, count: int) -> None:
    """Publish `count` messages of about 230 bytes, all at the same moment, each a transaction of its own."""
    body = message_of(half_body())
    first, nonce = time.time_ns() // 1_000_000 - count // IDS_A_MS, os.urandom(8).hex()
    async with connected(dsn) as connection, connection.transaction():
        await connection.execute(LOCK)
        for at in range(0, count, AT_A_TIME):
            rows = min(AT_A_TIME, count - at)
            known = (GROUP, topic, body, sha256(body).digest())
            await connection.execute(COMMITTED, first, at, rows, nonce, *known, timeout=300)
        # As the service that publishes does it; told when the database transaction commits.
        await connection.execute(NOTIFY, CHANNEL, topic)


async def fill_ours(dsn: str, ids: list[str]) -> None:
    """Store halves as `/half` does, without its cost."""
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
    """Store halves as the naive service does, without its cost."""
    messages = half_body().partition(b'"messages":')[2].removesuffix(b"}").decode()
    async with connected(dsn) as connection:
        await connection.copy_records_to_table(
            "naive",
            records=[(id_, GROUP, "half", messages) for id_ in as_uuids(ids)],
            columns=["transaction_id", "producer_group", "state", "messages"],
        )
