"""Write a generated day into Postgres: make new tables, fill them with COPY, then attach them.

Only for a database that is not in use. Afterward it has the rows of a service that ran the whole day.
"""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from io import BytesIO
from typing import Any
from uuid import UUID

import psycopg
import pyarrow as pa
import pyarrow.csv as arrow_csv
from psycopg import sql

from spark.postgres.connections import partition_name
from spark.schemas import BIG
from spark.synthetic import ledgers
from spark.synthetic.chunk import chunk_of
from spark.synthetic.columns import bytea_texts
from spark.synthetic.deliveries import REPLAY
from spark.synthetic.plan import GROUPS, INTERVAL_S, MAX_CHECKS, OWN_TOPIC, UNANSWERED_PARK_S, Plan, topics_of

NOWHERE = "http://127.0.0.1:9/hook"

_GROUP = """
insert into producer_group (name, check_urls, immunity_s, interval_s, max_checks, check_timeout_s, unanswered_park_s,
  on_exhausted, check_max_in_flight, ping_interval_s, secrets, created_at, updated_at, check_window, next_ping_at)
values (%s, '{http://127.0.0.1:9/check}', 6, %s, %s, 5, %s, 'rollback', 32, 60, '[]', %s, %s, 32, %s)
on conflict do nothing
"""
_SUBSCRIPTION = """
insert into subscription (name, topics, filters, destination, secrets, start, shards, max_in_flight, timeout_s, retry,
  state, created_at, updated_at, started_after, matches_since)
values (%s, %s, %s, %s, '[]', '"latest"', %s, 64, 10, '{5,30,300,1800}', 'active', %s, %s, %s, %s)
returning subscription_id
"""
# If an earlier day is generated after a later one, the subscriptions must already exist on the earlier day.
_KNOWN = """
update subscription set created_at = least(created_at, %s), matches_since = least(matches_since, %s)
where name = %s and deleted_at is null returning subscription_id
"""
_EARLIER = """
insert into subscription_version (subscription_id, at, name, topics, filters, state, ordered, on_dead, shards,
  max_in_flight, timeout_s, retry, started_after)
select subscription_id, %s, name, topics, filters, state, ordered, on_dead, shards, max_in_flight, timeout_s, retry,
  started_after
from subscription where subscription_id = %s
"""
_CHECKPOINT = """
insert into checkpoint (subscription_id, shards, shard, "offset", moved_at)
select %s, %s, shard, %s, now() from generate_series(0, %s - 1) as shard
on conflict (subscription_id, shards, shard) do update set "offset" = excluded."offset"
"""
# The one that all replayed deliveries name. It was canceled, so it owes no further receipt.
_REPLAY = """
insert into replay (replay_id, subscription_id, after, until, "offset", state, created_at, moved_at, ended_at)
overriding system value values (%s, %s, 0, %s, %s, 'cancelled', %s, now(), now())
on conflict (replay_id) do update set created_at = least(replay.created_at, excluded.created_at)
"""
_ATTACHED = "select exists (select from pg_inherits where inhrelid = to_regclass(%s) and inhparent = to_regclass(%s))"
_SWEPT = "insert into sweep (name, reached, ran_at) values ('main', now(), now()), ('hourly', now(), now())"

# The evidence of the verdicts of people.
_ACTS = """
insert into audit (at, actor, what, target, detail)
select decided_at, actor, 'transaction.verdict', transaction_id::text,
  jsonb_build_object('verdict', case verdict when 1 then 'commit' else 'rollback' end)
from {} where source = 3 order by decided_at
"""


class NotEmptyError(Exception):
    """The day, or the database, has rows that would be lost or duplicated."""


def prepare(dsn: str, plan: Plan, subscriptions: int, *, unconstrained: bool) -> Plan:
    """Make the day's tables, empty and detached, and the rows that they refer to; return the plan with its numbers.

    `unconstrained` replaces the primary key of outbox by an index, permanently. Raises NotEmptyError, psycopg's errors.
    """
    with psycopg.connect(dsn) as connection:
        if unconstrained:
            _refuse_rows(connection, list(BIG))
            connection.execute("alter table outbox drop constraint if exists outbox_pkey")
            # The proof reads by ranges of ids.
            connection.execute("create index if not exists outbox_by_id on outbox (transaction_id, position)")
        names = [partition_name(table, plan.day) for table in BIG]
        _refuse_rows(connection, [name for name in names if _exists(connection, name)])
        for table in BIG:
            _make_table(connection, table, plan.day)
        plan = _numbered(connection, plan)
        ids = _subscribe(connection, replace(plan, ids=(0,) * subscriptions))
        for name in (*GROUPS, *plan.refused_groups):
            at = plan.subscribed_at
            connection.execute(_GROUP, (name, INTERVAL_S, MAX_CHECKS, UNANSWERED_PARK_S, at, at, datetime.now(UTC)))
        topics = [OWN_TOPIC, *(topic for number in range(subscriptions) for topic in topics_of(number))]
        connection.execute(
            "insert into topic (name, first_seen_at) select unnest(%s::text[]), %s on conflict do nothing",
            (topics, plan.subscribed_at),
        )
        return replace(plan, ids=ids)


def _exists(connection: psycopg.Connection, name: str) -> bool:
    return _value(connection, "select to_regclass(%s) is not null", name) is True


def _refuse_rows(connection: psycopg.Connection, names: list[str]) -> None:
    for name in names:
        if _value(connection, sql.SQL("select exists (select from {})").format(sql.Identifier(name))):
            raise NotEmptyError(f"{name} has rows. Choose a day, or a database, that has none.")


def _make_table(connection: psycopg.Connection, table: str, day: date) -> None:
    """Replace the day's table by an empty one without indexes; they are built when it is full."""
    name = sql.Identifier(partition_name(table, day))
    connection.execute(sql.SQL("drop table if exists {}").format(name))
    connection.execute(
        sql.SQL("create table {} (like {} including all excluding indexes)").format(name, sql.Identifier(table))
    )


def _numbered(connection: psycopg.Connection, plan: Plan) -> Plan:
    """Reserve the offsets and attempt ids of the whole day."""
    firsts = []
    for sequence, each in (("outbox_offset", plan.offsets), ("attempt_id", plan.attempts)):
        first = _value(connection, "select nextval(%s::regclass)", sequence)
        _value(connection, "select setval(%s::regclass, %s)", sequence, first + plan.chunks * each)
        firsts.append(first)
    return replace(plan, first_offset=firsts[0], first_attempt=firsts[1])


def _subscribe(connection: psycopg.Connection, plan: Plan) -> tuple[int, ...]:
    """Make the subscriptions that no earlier generated day has made; each has read the whole day."""
    ids = []
    for made in plan.subscriptions():
        at, destination = plan.subscribed_at, f'{{"type": "webhook", "url": "{NOWHERE}"}}'
        known = _value(connection, _KNOWN, at, at, made.name)
        row = (made.name, list(made.topics), made.filters, destination, made.shards, at, at, plan.first_offset - 1, at)
        ids.append(known if known is not None else _value(connection, _SUBSCRIPTION, *row))
        if known is not None:
            connection.execute(_EARLIER, (at, known))
        connection.execute(_CHECKPOINT, (ids[-1], made.shards, plan.last_offset, made.shards))
    connection.execute(_REPLAY, (REPLAY, ids[0], plan.last_offset, plan.last_offset, plan.subscribed_at))
    return tuple(ids)


def fill(dsn: str, plan: Plan, chunk: int) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Generate a chunk and copy it; return the rows by table and the planted faults.

    Raises TooFewError, OSError, psycopg's errors.
    """
    made = chunk_of(plan, chunk)
    with psycopg.connect(dsn) as connection:
        # No caller waits for these rows.
        connection.execute("set local synchronous_commit = off")
        for table, rows in made.tables.items():
            name = partition_name(table, plan.day) if table in BIG else table
            if rows.num_rows:
                _copy(connection, name, rows)
    if plan.ledgers is not None:
        ledgers.write(plan.ledgers, chunk, made.ledgers)
    return {table: rows.num_rows for table, rows in made.tables.items()}, made.planted


def _copy(connection: psycopg.Connection, name: str, rows: pa.Table) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, rows.column_names))
    statement = sql.SQL("copy {} ({}) from stdin (format csv)").format(sql.Identifier(name), names)
    with connection.cursor() as cursor, cursor.copy(statement) as copy:
        copy.write(as_csv(rows))


def as_csv(rows: pa.Table) -> bytes:
    """Return rows as CSV without a header: null is empty, and a text is quoted."""
    for at, column in enumerate(rows.schema):
        if pa.types.is_binary(column.type):
            rows = rows.set_column(at, column.name, bytea_texts(rows.column(at).combine_chunks()))
    buffer = BytesIO()
    arrow_csv.write_csv(rows, buffer, arrow_csv.WriteOptions(include_header=False, batch_size=65_536))
    return buffer.getvalue()


def attach(dsn: str, plan: Plan, table: str) -> None:
    """Attach a day's table, which makes its indexes, and analyze it."""
    low, high = (UUID(int=(plan.begins_us // 1000 + ms) << 80) for ms in (0, 86_400_000))
    name = partition_name(table, plan.day)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set maintenance_work_mem = '256MB'")
        if not _value(connection, _ATTACHED, name, table):
            connection.execute(
                sql.SQL("alter table {} attach partition {} for values from ({}) to ({})").format(
                    sql.Identifier(table), sql.Identifier(name), str(low), str(high)
                )
            )
        connection.execute(sql.SQL("analyze {}").format(sql.Identifier(name)))


def finish(dsn: str, plan: Plan) -> None:
    """Write the day's row, and record that the sweeps have passed the day."""
    low, high = (UUID(int=(plan.begins_us // 1000 + ms) << 80) for ms in (0, 86_400_000))
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "insert into day (day, low, high, state, changed_at) values (%s, %s, %s, 'open', now())"
            " on conflict do nothing",
            (plan.day, low, high),
        )
        connection.execute(sql.SQL(_ACTS).format(sql.Identifier(partition_name("op", plan.day))))
        connection.execute(f"{_SWEPT} on conflict (name) do update set reached = excluded.reached")


def default_day(dsn: str) -> date:
    """Return the day before yesterday by the database's clock: it is over, and none of its rows is due."""
    with psycopg.connect(dsn) as connection:
        now: datetime = _value(connection, "select now()")
    return now.astimezone(UTC).date() - timedelta(days=2)


def _value(connection: psycopg.Connection, statement: Any, *values: Any) -> Any:
    row = connection.execute(statement, values or None).fetchone()
    return row[0] if row else None
