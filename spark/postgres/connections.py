"""The driver's connections to Postgres: one writes and holds the run's lock, the other holds the snapshot."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from spark import schemas
from spark.audit_retention import AUDIT_KEEP_S
from spark.day_selection import Seen
from spark.errors import BusyError, RunFailedError, SnapshotLostError
from spark.postgres.readers import Readers
from spark.postgres.standby import StandbySettings, cancelled_by_replay

Connection: TypeAlias = "psycopg.Connection[dict[str, Any]]"

# Only one run at a time writes. The service also defines this lock, and a test checks that both are equal.
RUN_LOCK = 7010
OLDEST_SERVER = 150000
# Time limits that a role or a database sets for short statements would interrupt a long read.
NO_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout", "transaction_timeout")
# Upkeep waits at most 100 ms at a time; only a person locks a day for longer than this time.
LOCK_WAIT = "30s"
# A day of which only a count is wanted is left to the next run instead.
LOOK_WAIT = "100ms"

DAYS = """
select day, low, high, case when state = 'open' then changed_at end as open_since, archive, archive_manifest
from day where state <> 'gone' order by day
"""
RULES = "select name, value from shared_rule"
LOCK_HOLDER = """
select a.application_name, host(a.client_addr) as client_addr, a.backend_start
from pg_locks l join pg_stat_activity a using (pid)
where l.locktype = 'advisory' and l.database = (select oid from pg_database where datname = current_database())
  and l.classid = 0 and l.objid = %s and l.objsubid = 1 and l.granted
"""
# On a standby, the time of the last replayed commit, or at least of its last restart point. The time is read before the
# snapshot is taken, so that no row appears older than it is.
MOMENT = """
select pg_is_in_recovery() as standby, case when pg_is_in_recovery()
  then coalesce(pg_last_xact_replay_timestamp(), (select checkpoint_time from pg_control_checkpoint()))
  else clock_timestamp() end as seen_at
"""
STANDBY = """
select current_setting('hot_standby_feedback')::boolean as feedback, setting::double precision / 1000 as delay_s
from pg_settings where name = 'max_standby_streaming_delay'
"""
# The state of small tables that determines the expected deliveries, and the progress of the slowest subscription within
# the day's offsets. Beyond the day its checkpoint does not matter, and it moves with every delivery.
SUBSCRIPTIONS = "select coalesce(max(version_id), 0) as newest from subscription_version"
REACHED = """
select min(least(c."offset", o.last)) as reached
from (select max("offset") as last from {outbox}) o, checkpoint c join subscription s using (subscription_id)
where o.last is not null and s.deleted_at is null
"""
# The replays over a range of offsets that have ended: one that runs would be read about each night. Ids are given out
# before rows become visible, so both numbers are needed; the replays of a deleted subscription are removed. The table
# is small.
_REPLAYS_OVER = """
select count(*) as replays, coalesce(max(p.replay_id), 0) as newest_replay from replay p
where p.state <> 'running' and p.after < {last} and p.until >= {first}
"""
# The redeliveries and drops of a day's dead letters. Their records are removed after 45 days, so their number alone may
# stay the same. Served by redelivery_transaction alone: a person can redeliver very many.
_REDELIVERED = """
select count(*) as redelivery, coalesce(max(r.redelivery_id), 0) as newest_redelivery from redelivery r
where r.transaction_id >= {low} and r.transaction_id < {high}
"""
REDELIVERED = _REDELIVERED.format(low="%(low)s", high="%(high)s")
# Served by outbox_by_offset, from its two ends.
REPLAYED = f"""
select o.first as first_offset, o.last as last_offset, p.replays, p.newest_replay
from (select min("offset") as first, max("offset") as last from {{outbox}}) o
cross join lateral ({_REPLAYS_OVER.format(first="o.first", last="o.last")}) p
"""  # noqa: S608 -- names of ours
# The days over which there was more than their signatures have: a replay that ended, a redelivery, or a subscription
# that begins before their last message. It reads none of their own tables, which upkeep may remove at any time. Served
# by the primary key of day; subscription_version is small.
REPLAYED_SINCE = f"""
select f.day
from unnest(
  %(day)s::date[], %(first_offset)s::bigint[], %(last_offset)s::bigint[], %(replays)s::bigint[],
  %(newest_replay)s::int[], %(redelivery)s::bigint[], %(newest_redelivery)s::bigint[], %(subscription)s::bigint[]
) as f (day, first_offset, last_offset, replays, newest_replay, redelivery, newest_redelivery, version)
join day d on d.day = f.day
cross join lateral ({_REPLAYS_OVER.format(first="f.first_offset", last="f.last_offset")}) p
cross join lateral ({_REDELIVERED.format(low="d.low", high="d.high")}) r
where p.replays > f.replays or p.newest_replay > f.newest_replay
  or r.redelivery > f.redelivery or r.newest_redelivery > f.newest_redelivery
  or exists (
    select from subscription_version v group by v.subscription_id
    having min(v.version_id) > f.version and min(v.started_after) < f.last_offset
  )
"""  # noqa: S608 -- names of ours
# What a signature has for it.
OF_REPLAYS = (
    *("first_offset", "last_offset", "replays", "newest_replay", "redelivery", "newest_redelivery"),
    "subscription",
)
# The refused ends of a day: at most one for each verdict and source of a transaction. Served by attempt_refused.
REFUSED = "select count(*) as refused from {attempt} where kind = 'refused'"
# The same for days whose signatures lack that: an older version made them final. The day's offsets are not known, so
# any replay that ended since the run may be one of the day; it is proved again, and has a signature then. A row with a
# time shortly before the run may have become visible after it, and the run may be unknown. The table replay is small.
REPLAYED_SINCE_RUN = """
select f.day
from unnest(%(day)s::date[], %(seen_at)s::timestamptz[]) as g (day, seen_at)
cross join lateral (select g.day, coalesce(g.seen_at - interval '1 hour', '-infinity') as seen_at) f
join day d on d.day = f.day
where exists (select from replay p where p.state <> 'running' and coalesce(p.ended_at, p.moved_at) > f.seen_at)
  or exists (
    select from redelivery r where r.transaction_id >= d.low and r.transaction_id < d.high and r.at > f.seen_at
  )
"""
# Ids are compared by range: served by the primary key, or the table is small.
SMALL_COUNTS = " union all ".join(
    [
        f"select '{table}' as name, count(*) as rows from {table} "  # noqa: S608 -- names of ours
        "where transaction_id >= %(low)s and transaction_id < %(high)s"
        for table in schemas.OF_DAY
    ]
    + [f"select '{table}', count(*) from {table}" for table in schemas.WHOLE]  # noqa: S608 -- names of ours
)


@dataclass(frozen=True, slots=True)
class Day:
    """A day whose tables are in the database: half-open id range, and the place and manifest of its archive, if any.

    `open_since`: the day has accepted receipts at least since this time; None if upkeep has closed it.
    """

    day: date
    low: UUID
    high: UUID
    open_since: datetime | None
    archive: str | None
    archive_manifest: Mapping[str, Any] | None


def partition_name(table: str, day: date) -> str:
    """Return the service's name of a table's partition of a day, such as `half_20261121`."""
    return f"{table}_{day:%Y%m%d}"


def connect(url: str) -> Connection:
    """Open a connection that commits each statement, in UTC and without time limits.

    The date style is set because psycopg reads only ISO, and a role or a database may have another style. Raises
    RunFailedError if the database cannot be reached or other clients share the session.
    """
    connection = _opened(url)
    try:
        if connection.info.server_version < OLDEST_SERVER:
            raise RunFailedError("Halfnote needs Postgres 15 or newer; this server is older.")
        _refuse_pooled(connection, url)
        # Compiling the expressions of one of the proof's statements takes longer than to run it.
        connection.execute("set timezone = 'UTC'; set datestyle = 'ISO'; set jit = off")
        # In a stricter level, which a database or a role may have, a statement fails beside the service's changes.
        connection.execute("set default_transaction_isolation = 'read committed'")
        connection.execute(
            "select set_config(name, '0', false) from pg_settings where name = any(%s)", [list(NO_LIMITS)]
        )
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(url: str) -> Connection:
    try:
        connection = psycopg.connect(
            _url_of(url).replace("postgresql+asyncpg://", "postgresql://", 1),
            autocommit=True,
            row_factory=dict_row,
            connect_timeout=10,
            application_name=f"halfnote proof {socket.gethostname()[:32]}:{os.getpid()}",
            # Keepalives detect a dead peer within a minute. They also keep a firewall from dropping an idle connection.
            keepalives_idle=30,
            keepalives_interval=10,
            keepalives_count=3,
        )
    except psycopg.Error as error:
        raise RunFailedError(f"The database cannot be reached: {first_line(error)}") from None
    # A standby refuses the strictest level, which a database or a role may have for each statement.
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    return connection


def _url_of(address: str) -> str:
    """Return a URL, read from its file if the address is `file:` and a path. Raises RunFailedError."""
    if not address.startswith("file:"):
        return address
    path = Path(address.removeprefix("file:"))
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunFailedError(f"HALFNOTE_DATABASE_URL_FILE: {path} cannot be read: {error}") from None


def _refuse_pooled(connection: Connection, url: str) -> None:
    """Raise RunFailedError behind a transaction or statement pooler: locks, snapshots and settings need a session.

    There is such a pooler if two clients get the same backend, or one client gets several backends.
    """
    another = _opened(url)
    try:
        before = _backend(connection)
        with another.transaction():
            other, after = _backend(another), _backend(connection)
        shared = before == other or before != after
    except psycopg.Error as error:
        # The error text of pgbouncer in statement mode.
        if "statement pooling mode" not in str(error):
            raise RunFailedError(f"The database cannot be reached: {first_line(error)}") from None
        shared = True
    finally:
        another.close()
    if shared:
        raise RunFailedError(
            "The database's URL leads to a transaction pooler or a statement pooler; the proof and the archive need "
            "sessions (locks, snapshots). Use a direct connection, or the pooler's session mode."
        )


def _backend(connection: Connection) -> int:
    # In its own level, because the session has its settings only if it is not shared.
    with connection.transaction():
        row = connection.execute("select pg_backend_pid() as pid").fetchone()
    assert row is not None
    pid: int = row["pid"]
    return pid


def first_line(error: BaseException) -> str:
    """Return an error's text in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def only_run(url: str) -> Iterator[Connection]:
    """Lend the connection that writes, while this is the only run over its database.

    The lock belongs to the session. It ends with the connection, even if the program is killed. Raises RunFailedError,
    which names the other run if there is one.
    """
    connection = connect(url)
    try:
        row = connection.execute("select pg_try_advisory_lock(%s) as taken", [RUN_LOCK]).fetchone()
        assert row is not None
        if not row["taken"]:
            raise BusyError(f"Another run is active: {_holder(connection)}. Wait until it ends, or stop it.")
        yield connection
    finally:
        give_back(connection)


def give_back(connection: Connection) -> None:
    """Release the locks of a connection, then close it, because the server may notice the close after the next run."""
    with contextlib.suppress(psycopg.Error):
        if connection.info.transaction_status == TransactionStatus.IDLE:
            connection.execute("select pg_advisory_unlock_all()")
    connection.close()


def _holder(connection: Connection) -> str:
    row = connection.execute(LOCK_HOLDER, [RUN_LOCK]).fetchone()
    if row is None:
        return "it ended just now"
    name, address = row["application_name"] or "a session", row["client_addr"] or "this machine"
    return f"{name} from {address}, since {row['backend_start'].isoformat(' ', 'seconds')}"


class Snapshot:
    """A snapshot of the database. Other sessions of the same server can import it while it is open.

    `name`: its name for the import. `seen_at`: a time not later than the snapshot; on a standby, the replayed time.
    `audit_keep_s`: how many seconds rows of the audit are kept. `readers`: connections that read it. `ended`: set when
    it is not needed any more, so that every reader stops. `telling_day`: the day that tells what is of no day, such as
    a broken audit; yesterday, unless the run sets another.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        seen_at: datetime,
        *,
        standby: bool,
        audit_keep_s: int = AUDIT_KEEP_S,
    ) -> None:
        self.connection = connection
        self.name = name
        self.seen_at = seen_at
        self.standby = standby
        self.audit_keep_s = audit_keep_s
        self.readers = Readers(connection, name)
        self.ended = threading.Event()
        self.telling_day = seen_at.astimezone(UTC).date() - timedelta(days=1)

    def days(self) -> list[Day]:
        """Return the days that are not gone, oldest first."""
        return [Day(**row) for row in self.rows(DAYS)]

    def day(self, day: date) -> Day:
        """Return one day. Raises SnapshotLostError if it is gone."""
        for found in self.days():
            if found.day == day:
                return found
        raise SnapshotLostError(f"The day {day} is gone.")

    def rules(self) -> dict[str, float]:
        """Return shared_rule."""
        return {row["name"]: row["value"] for row in self.rows(RULES)}

    def lock(self, days: Iterable[date]) -> None:
        """Lock the days' tables, so that they are not dropped while the snapshot is open; upkeep tries again later.

        Raises SnapshotLostError if a table is dropped already: a new snapshot shows that the day is gone.
        """
        names = [partition_name(table, day) for day in days for table in schemas.BIG]
        if not names:
            return
        try:
            self.connection.execute(f"set local lock_timeout = '{LOCK_WAIT}'")
            self.connection.execute(f"lock table {', '.join(names)} in access share mode")
        except psycopg.errors.UndefinedTable as error:
            raise SnapshotLostError(f"A day was removed while the run began: {first_line(error)}") from None
        except psycopg.errors.LockNotAvailable:
            raise RunFailedError(f"Another session locks a day's tables for more than {LOCK_WAIT}; end it.") from None

    def signature(self, day: Day, rows: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the day's signature as JSON, which shows whether the day changed.

        It has the rows by table, the changes of subscriptions, the progress of the slowest one, the archive, the
        replays over its offsets, the redeliveries, and the refused ends. An `update` of the day's own rows does not
        change it. `rows`: the number of rows of its own tables, if it is known; else they are counted, which reads each
        table.
        """
        counted = {
            table: self.rows(f"select count(*) as rows from {partition_name(table, day.day)}")[0]["rows"]  # noqa: S608
            if rows is None
            else rows[table]
            for table in schemas.BIG
        }
        [subscriptions] = self.rows(SUBSCRIPTIONS)
        [slowest] = self.rows(REACHED.format(outbox=partition_name("outbox", day.day)))
        [replays] = self.rows(REPLAYED.format(outbox=partition_name("outbox", day.day)))
        [redelivered] = self.rows(REDELIVERED, {"low": day.low, "high": day.high})
        small = self.small_counts(day)
        return (
            counted
            | {table: small[table] for table in schemas.OF_DAY}
            | replays
            | redelivered
            | self.rows(REFUSED.format(attempt=partition_name("attempt", day.day)))[0]
            | {"subscription": subscriptions["newest"], "archive": day.archive, "reached": slowest["reached"]}
        )

    def touched_since(self, seen: Mapping[date, Seen]) -> set[date]:
        """Return the days over which a replay ended, a redelivery began, a subscription begins that is new, or an end
        was refused, since these results.

        By their signatures; of a version that did not look for all of that, replays and redeliveries by the time of the
        run. A day that upkeep is about to remove is not looked at for refused ends.
        """
        known = {day: one.signature for day, one in seen.items() if all(name in one.signature for name in OF_REPLAYS)}
        given: dict[str, Any] = {name: [one[name] for one in known.values()] for name in OF_REPLAYS}
        older = {day: one.seen_at for day, one in seen.items() if day not in known}
        found = self.rows(REPLAYED_SINCE, given | {"day": list(known)}) if known else []
        if older:
            found += self.rows(REPLAYED_SINCE_RUN, {"day": list(older), "seen_at": list(older.values())})
        touched = {row["day"] for row in found}
        return touched | {
            day
            for day, one in seen.items()
            if day not in touched and "refused" in one.signature and self._refused(day) > one.signature["refused"]
        }

    def _refused(self, day: date) -> int:
        """Return the number of a day's refused ends; 0 if its table is gone or is being removed."""
        # The locks are given back at once, so that upkeep does not wait for the run.
        try:
            with self.connection.transaction(force_rollback=True):
                self.connection.execute(f"set local lock_timeout = '{LOOK_WAIT}'")
                refused: int = self.rows(REFUSED.format(attempt=partition_name("attempt", day)))[0]["refused"]
        except (psycopg.errors.UndefinedTable, psycopg.errors.LockNotAvailable):
            return 0
        return refused

    def small_counts(self, day: Day) -> dict[str, int]:
        """Return how many rows with the day's ids each small table has, and how many in total if it is read whole."""
        return {row["name"]: row["rows"] for row in self.rows(SMALL_COUNTS, {"low": day.low, "high": day.high})}

    def pages(self, relation: str) -> int:
        """Return the number of pages that hold all rows of the snapshot; new rows are added after these pages."""
        size = "pg_relation_size(to_regclass(%s)) / current_setting('block_size')::bigint"
        pages: int = self.rows(f"select coalesce({size}, 0) as pages", [relation])[0]["pages"]
        return pages

    def standby_settings(self) -> StandbySettings | None:
        """Return a standby's settings for readers; None for a primary."""
        if not self.standby:
            return None
        row = self.rows(STANDBY)[0]
        return StandbySettings(row["feedback"], -1 if row["delay_s"] < 0 else row["delay_s"])

    def rows(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return a statement's rows in the snapshot."""
        return self.connection.execute(statement, parameters).fetchall()


@contextmanager
def open_snapshot(url: str, audit_keep_s: int = AUDIT_KEEP_S) -> Iterator[Snapshot]:
    """Take a snapshot and hold it until the end of the block. `audit_keep_s`: how many seconds audit rows are kept.

    Raises RunFailedError, and SnapshotLostError if the server ended the snapshot: a new start may help.
    """
    connection, standby = connect(url), False
    try:
        moment = connection.execute(MOMENT).fetchone()
        assert moment is not None
        standby = moment["standby"]
        connection.execute("begin transaction isolation level repeatable read read only")
        exported = connection.execute("select pg_export_snapshot() as name").fetchone()
        assert exported is not None
        snapshot = Snapshot(connection, exported["name"], moment["seen_at"], standby=standby, audit_keep_s=audit_keep_s)
        with closing(snapshot.readers):
            yield snapshot
    except psycopg.Error as error:
        said = first_line(error)
        if cancelled_by_replay(str(error), standby=standby):
            raise SnapshotLostError(f"The standby cancelled a read: {said}") from None
        raise RunFailedError(f"The database failed while it was read: {said}") from error
    finally:
        connection.close()
