"""Days in Postgres in which nothing is wrong, made by SQL; and the proof over them, here or in a process of its own."""

import asyncio
import os
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import psycopg

from app.database.connection import connect
from app.migrate import ensure_days
from spark.jobs.reconcile import main

Connection: TypeAlias = "psycopg.Connection[Any]"

ROOT = Path(__file__).parent.parent.parent

# One transaction every 100 ms from midnight on, each committed, its one message delivered.
IDS = """
create temp table made on commit drop as
select i, at, (lpad(to_hex((extract(epoch from at) * 1000)::bigint), 12, '0') || '70008' || lpad(to_hex(i), 15, '0'))
  ::uuid as id, sha256(convert_to(i::text, 'UTF8')) as digest
from (
  select i, (%(day)s::date)::timestamp at time zone 'UTC' + i * interval '100 ms' + interval '1 us' as at
  from generate_series(%(first)s::int, %(last)s::int) i
) numbered
"""
# As the service computes it.
DIGEST = """sha256(convert_to('[false,"shop",[["order","order-' || i || '","created","{\\"vip\\":\\"yes\\"}",'
  || '"text/plain","' || encode(digest, 'base64') || '",null]],null,null]', 'UTF8'))"""
FILL = (
    f"""insert into half (transaction_id, position, producer_group, topic, key, tag, headers, content_type, body,
  body_digest, born_at, first_check_at, digest)
select id, 0, 'shop', 'order', 'order-' || i, 'created', '{{"vip": "yes"}}', 'text/plain', convert_to(i::text, 'UTF8'),
  digest, at, at + interval '6 s', {DIGEST} from made order by id""",
    "insert into op (transaction_id, verdict, source, decided_at) "
    "select id, 1, 0, at + interval '10 ms' from made order by id",
    """insert into outbox (transaction_id, position, "offset", topic, key, tag, committed_at)
select id, 0, i, 'order', 'order-' || i, 'created', at + interval '10 ms' from made order by id""",
    """insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at,
  duration_ms, status, digest, settled_at)
select id, 0, subscription_id, i, 'delivered', 1, at + interval '20 ms', 12, 200, digest, at + interval '40 ms'
from made, subscription order by id""",
    """update checkpoint set "offset" = greatest("offset", (select max(i) from made))""",
)
# As the service does, one database transaction writes the subscription and the audit's row of it.
SUBSCRIBE = """
with made as (
  insert into subscription (name, topics, destination, secrets, start, max_in_flight, timeout_s, retry, state,
    created_at, updated_at, started_after, matches_since)
  select 'billing', '{order}', '{}', '[]', '"earliest"', 1, 1, '{}', 'active', at, at, 0, at
  from (select now() - interval '90 days' as at) long_ago
  where not exists (select from subscription)
  returning subscription_id, created_at
), audited as (
  insert into audit (at, actor, what, target, detail)
  select created_at, 'ops', 'subscription.put', 'billing', '{"new": true, "asked": {"topics": ["order"]}}' from made
)
insert into checkpoint (subscription_id, shards, shard, "offset", moved_at)
select subscription_id, 1, 0, 0, now() from made
"""


def days_ago(number: int) -> date:
    """The UTC day so many days before today; today does not end while tests run."""
    return _today() - timedelta(days=number)


@cache
def _today() -> date:
    return datetime.now(UTC).date()


def add_day(dsn: str, day: date) -> None:
    """Make the partitions of a day, and of the day before."""

    async def work() -> None:
        connection = await connect(dsn)
        try:
            await ensure_days(connection, datetime(day.year, day.month, day.day, tzinfo=UTC), days_ahead=0)
        finally:
            await connection.close()

    asyncio.run(work())


def fill_day(dsn: str, day: date, count: int, *, first: int = 1) -> None:
    """Make a day with transactions numbered from `first` on, as many as its 24 hours have tenths of seconds at most."""
    add_day(dsn, day)
    with psycopg.connect(dsn) as db:
        db.execute(SUBSCRIBE)
        if count:
            db.execute(IDS, {"day": day, "first": first, "last": first + count - 1})
            for statement in FILL:
                db.execute(statement)


def flip_ops(dsn: str, count: int = 1, verdict: int = 2) -> list[str]:
    """Give the first ops another verdict; return their ids: what is published is rolled back now, a finding each."""
    with psycopg.connect(dsn) as db:
        first = db.execute("select transaction_id from op order by 1 limit %s", [count]).fetchall()
        db.execute("update op set verdict = %s where transaction_id = any(%s)", [verdict, [row[0] for row in first]])
    return [str(row[0]) for row in first]


def rows(dsn: str, statement: str, *parameters: Any) -> list[dict[str, Any]]:
    """What a statement finds."""
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as db:
        return db.execute(statement, parameters).fetchall()


def prove(dsn: str, *options: object) -> int:
    """Run the proof in this process and its Spark session; return its exit status."""
    return main(["--database-url", dsn, *map(str, options)])


def start_proof(
    dsn: str, temporary: Path, *options: object, program: tuple[str, ...] = (), cwd: Path = ROOT, **env: str
) -> subprocess.Popen[str]:
    """Start the proof as a separate process; its temporary files are below `temporary`."""
    command = program or (sys.executable, "-m", "spark.jobs.reconcile")
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HALFNOTE_", "SPARK_", "PYSPARK"))
    }
    return subprocess.Popen(
        [*command, *map(str, options)],
        cwd=cwd,
        env=inherited
        | {"HALFNOTE_DATABASE_URL": dsn, "TMPDIR": str(temporary), "SPARK_LOCAL_IP": "127.0.0.1"}
        | {"PYSPARK_PYTHON": sys.executable}
        | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
