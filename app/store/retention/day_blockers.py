"""Find what keeps a day from being removed."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import TypeAlias

from app.database.connection import Connection
from app.store.retention.day_ranges import IdRange
from app.store.retention.days import Day, partition_name
from app.store.subscriptions.subscriptions import Route, Subscription
from app.topic_patterns import match_sql

# The most log entries, retries or dead letters of a day that one statement reads.
AT_ONCE = 1000

# check_back by primary key range, with each row looked up in op.
SWEPT = """
with swept as materialized (
  select c.state, count(*) as n from check_back c
  left join lateral (select true as decided from op o where o.transaction_id = c.transaction_id offset 0) o on true
  where c.transaction_id between $1 and $2 and o.decided is null group by c.state
)
select coalesce((select n from swept where state = 1), 0) as in_doubt,
  coalesce((select n from swept where state = 2), 0) as parked
"""

# Both by primary key range. Halves that no sweep has found count too.
UNDECIDED = """
select count(*) from half h where h.transaction_id between $1 and $2 and h.position = 0
  and not exists (
    select from op o where o.transaction_id between $1 and $2 and o.transaction_id = h.transaction_id
  )
"""

# Rows may still become visible while a database transaction is open that began before a given time. Both times come
# from the server's clock; the caller adds a margin.
WRITERS = """
select exists (
  select from pg_stat_activity
  where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
    and xact_start < $1 and (backend_xid is not null or backend_xmin is not null)
)
"""

# How many sessions use a snapshot in which the day is still open. The row's xmin is the database transaction that
# closed the day. Both backend_xmin and backend_xid count: an End that read the day as open may not have an xid yet.
OLDER_SNAPSHOTS = """
select count(*) from pg_stat_activity a, day d
where d.day = $1 and a.datname = current_database() and a.backend_type = 'client backend'
  and a.pid <> pg_backend_pid() and greatest(age(a.backend_xmin), age(a.backend_xid)) >= age(d.xmin)
"""


# Messages that a subscription takes ($4 topic patterns, $5 tags, $6 headers, as in the relay's window) and that have no
# receipt, dead letter or redelivery. A redelivery or drop by a person on a closed day leaves no receipt, so the record
# in `redelivery` shows that a person decided about the message and that it must not become a dead letter again. The id
# range prunes the partitions; then the primary keys and redelivery_transaction serve for each message (OFFSET 0),
# however old the planner's statistics are.
def matching_sql(replay: str) -> str:
    """Return the condition that a log entry `o` matches, with a replay's id as SQL; 0 for live delivery."""
    return f"""
o.transaction_id >= $1 and o.transaction_id < $2
  and {match_sql("o.topic", "$4::text[]")}
  and ($5::text[] is null or o.tag = any($5::text[]))
  and ($6::jsonb is null or exists (
    select from half h
    where h.transaction_id = o.transaction_id and h.position = o.position and h.headers @> $6::jsonb offset 0
  ))
  and not exists (
    select from receipt r
    where r.transaction_id = o.transaction_id and r.position = o.position and r.subscription_id = $3
      and r.replay = {replay} offset 0
  )
  and not exists (
    select from dead_letter d where d.subscription_id = $3 and d.replay = {replay}
      and d.transaction_id = o.transaction_id and d.position = o.position offset 0
  )
  and not exists (
    select from redelivery x where x.transaction_id = o.transaction_id and x.position = o.position
      and x.subscription_id = $3 and x.replay = {replay} offset 0
  )
"""  # noqa: S608 -- a condition of ours


MATCHING = matching_sql("0")
# The offset of its slowest shard.
PLACE = '(select coalesce(min(c."offset"), 0) from checkpoint c where c.subscription_id = $3)'


def replays_sql(table: str) -> str:
    """Return the recursive part `found`: the replays of a subscription's ($1) rows in a table, 0 for live delivery.

    One descent for each, of an index that begins with these two columns.
    """
    return f"""found as (
  (select r.replay from {table} r where r.subscription_id = $1 order by r.replay limit 1)
  union all
  select n.replay from found f, lateral (
    select r.replay from {table} r where r.subscription_id = $1 and r.replay > f.replay order by r.replay limit 1
  ) n
)"""  # noqa: S608 -- names of tables


# Whether it has retries of the day ($2 and $3), those of replays among them. A retry with its own copy of the message
# does not need the day. One range of the primary key for each replay (OFFSET 0): before Postgres 18, conditions on a
# day without the replay read the retries of all days.
RETRIES_WAIT = f"""
with recursive {replays_sql("delivery_retry")}
select exists (
  select from found f where exists (
    select from delivery_retry r
    where r.subscription_id = $1 and r.replay = f.replay and r.transaction_id >= $2 and r.transaction_id < $3
      and r.body is null offset 0
  )
)
"""  # noqa: S608 -- a constant

# Whether a message waits among the next entries of the day's log after the checkpoint and the offset $7. The day's
# partition of the log is named, because a plan for any day reads the partition whole. Served by outbox_by_offset.
WAITING = f"""
with span as materialized (
  select o.transaction_id, o.position, o."offset", o.topic, o.tag from {{outbox}} o
  where o."offset" > greatest($7, {PLACE}) order by o."offset" limit {AT_ONCE}
)
select max("offset") as reached, count(*) >= {AT_ONCE} as more,
  exists (select from span o where {MATCHING}) as waits
from span
"""  # noqa: S608 -- constants of this module

# Whether a running replay still has to read messages of the day. Served by replay_running, and by outbox_by_offset of
# the day's partition, which is named.
REPLAYING = """
select exists (
  select from replay p where p.subscription_id = $1 and p.state = 'running' and exists (
    select from {outbox} o where o."offset" > p."offset" and o."offset" <= p.until offset 0
  )
)
"""

# The subscriptions with a replay that runs. Served by replay_running.
REPLAYED = "select distinct subscription_id from replay where state = 'running'"

# When the oldest open database transaction began that may have written, or now. `committed_at` is read from the same
# clock, so it is no earlier in a message that becomes visible after this statement.
OLDEST_WRITER = """
select least(clock_timestamp(), (
  select min(xact_start) from pg_stat_activity
  where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()
    and (backend_xid is not null or backend_xmin is not null)
))
"""

# The database transactions that have read `day`: each holds a lock on it until its end. OLDER_SNAPSHOTS misses one
# that has read the day as open, got its xid after the close had its own, and has no snapshot any more: it only commits.
# The row's xmin changes with each close, so it tells one close from the next.
READERS = """
select d.xmin::text as version, array(
  select distinct l.virtualtransaction from pg_locks l
  where l.locktype = 'relation' and l.relation = 'day'::regclass and l.pid <> pg_backend_pid()
    and l.database = (select oid from pg_database where datname = current_database())
) as open from day d where d.day = $1
"""


# What decides which messages a subscription takes: its id, and its topics and filters.
SubscriptionRoute: TypeAlias = tuple[int, str]


@dataclass(frozen=True, slots=True)
class DayReaders:
    """The open database transactions that may have read a day's state, and the version of the row that was read."""

    version: str
    open: frozenset[str]


@dataclass(frozen=True, slots=True)
class LogLook:
    """A step of a look through a day's log: the offset it reached, whether more may follow, whether a message waits."""

    reached: int
    more: bool
    waits: bool


@dataclass(frozen=True, slots=True)
class DayUndecided:
    """A day's transactions without a verdict: swept ones by state, and all if the whole day was read (else None)."""

    in_doubt: int
    parked: int
    undecided: int | None

    @property
    def count(self) -> int:
        """How many transactions without a verdict the read found."""
        return max(self.undecided or 0, self.in_doubt + self.parked)


async def swept(connection: Connection, ids: IdRange) -> DayUndecided:
    """Count the transactions without a verdict in a range of ids that a sweep found."""
    row = await connection.fetchrow(SWEPT, ids.first, ids.last)
    assert row is not None
    return DayUndecided(row["in_doubt"], row["parked"], None)


async def undecided(connection: Connection, ids: IdRange) -> int:
    """Count the transactions without a verdict in a range of ids."""
    count: int = await connection.fetchval(UNDECIDED, ids.first, ids.last)
    return count


async def writers_since_before(connection: Connection, at: datetime) -> bool:
    """Return whether a database transaction that began before `at` is still open."""
    return bool(await connection.fetchval(WRITERS, at))


async def older_snapshots(connection: Connection, day: date) -> int:
    """Count the sessions that may still see the day as open."""
    count: int = await connection.fetchval(OLDER_SNAPSHOTS, day)
    return count


async def readers(connection: Connection, day: date, before: DayReaders | None) -> DayReaders:
    """Return the open database transactions that may have read a closed day as open.

    Those of `before`, an earlier look at the same close, that are still open; without it all that have read `day`. A
    database transaction that reads the day after the first look sees it closed.
    """
    row = await connection.fetchrow(READERS, day)
    assert row is not None
    found = DayReaders(row["version"], frozenset(row["open"]))
    if before is None or before.version != found.version:
        return found
    return DayReaders(found.version, found.open & before.open)


async def oldest_writer(connection: Connection) -> datetime:
    """Return a time before which no message was committed that is not visible yet, by the database's clock."""
    at: datetime = await connection.fetchval(OLDEST_WRITER)
    return at


async def replayed(connection: Connection) -> set[int]:
    """Return the ids of the subscriptions with a replay that runs."""
    return {row[0] for row in await connection.fetch(REPLAYED)}


async def retries_wait(connection: Connection, day: Day, subscription: Subscription) -> bool:
    """Return whether the subscription has retries of the day, those of replays among them."""
    return bool(await connection.fetchval(RETRIES_WAIT, subscription.subscription_id, day.low, day.high))


async def waiting(connection: Connection, day: Day, subscription: Subscription, after: int) -> LogLook:
    """Look whether the next entries of the day's log after an offset hold a message that waits for the subscription.

    It is committed, the subscription takes it and has not settled it. Retries are left out.
    """
    row = await connection.fetchrow(
        _in_log(WAITING, day), day.low, day.high, subscription.subscription_id, *of_route(subscription.route), after
    )
    assert row is not None
    return LogLook(after if row["reached"] is None else row["reached"], row["more"], row["waits"])


async def replaying(connection: Connection, day: Day, subscription: Subscription) -> bool:
    """Return whether a replay of the subscription still has to read messages of the day."""
    return bool(await connection.fetchval(_in_log(REPLAYING, day), subscription.subscription_id))


def of_route(route: Route) -> tuple[tuple[str, ...], list[str] | None, str | None]:
    """Return the parameters $4 to $6 of MATCHING."""
    return route.topics.patterns, route.tags, route.headers


def _in_log(statement: str, day: Day) -> str:
    return statement.format(outbox=partition_name("outbox", day.day))
