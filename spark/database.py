"""The driver's own connections to Postgres: one that writes and holds the run's lock, one that holds the snapshot."""

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, TypeAlias
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

from spark import schemas
from spark.errors import BusyError, RunFailedError, SnapshotLostError
from spark.standby import StandbySettings, cancelled_by_replay

Connection: TypeAlias = "psycopg.Connection[dict[str, Any]]"

RUN_LOCK = 7010
OLDEST_SERVER = 150000
# What a role or a database may have set for short statements would end a long read.
NO_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout", "transaction_timeout")
# Upkeep waits for 100 ms at a time; whoever locks a day for longer than this is a person.
LOCK_WAIT = "30s"

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
# On a standby, what it replayed last, or at least all up to its last restart point. The time is read before the
# snapshot is taken, so nothing looks older than it is.
MOMENT = """
select pg_is_in_recovery() as standby, case when pg_is_in_recovery()
  then coalesce(pg_last_xact_replay_timestamp(), (select checkpoint_time from pg_control_checkpoint()))
  else clock_timestamp() end as seen_at
"""
STANDBY = """
select current_setting('hot_standby_feedback')::boolean as feedback, setting::double precision / 1000 as delay_s
from pg_settings where name = 'max_standby_streaming_delay'
"""
# What changes which deliveries must be there, in tables of a few rows; and how far the slowest subscription has come in
# the day's part of the log. Past that its place says nothing of the day, and moves with every delivery.
SUBSCRIPTIONS = """
select coalesce(max(subscription_id), 0) as newest, max(matches_since) as changed, max(deleted_at) as deleted
from subscription
"""
REACHED = """
select min(least(c."offset", o.last)) as reached
from (select max("offset") as last from {outbox}) o, checkpoint c join subscription s using (subscription_id)
where o.last is not null and s.deleted_at is null
"""
# Ids are compared by range: by primary key, or the table is small.
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
    """A day whose tables are here: half-open id range, and where it is archived with what manifest, if it is.

    `open_since`: it has taken receipts since then at least; None of one that upkeep has closed, as it is leaving.
    """

    day: date
    low: UUID
    high: UUID
    open_since: datetime | None
    archive: str | None
    archive_manifest: Mapping[str, Any] | None


def partition_name(table: str, day: date) -> str:
    """Return the name of a table's partition of a day, as the service names it: `half_20261121`."""
    return f"{table}_{day:%Y%m%d}"


def connect(url: str) -> Connection:
    """Open a connection that commits each statement, in UTC and without time limits; RunFailedError if it cannot, or if
    its session is shared with others.

    However a role or a database shows times: psycopg reads ISO's form alone.
    """
    connection = _opened(url)
    try:
        if connection.info.server_version < OLDEST_SERVER:
            raise RunFailedError("Halfnote needs Postgres 15 or newer; this server is older.")
        _refuse_pooled(connection, url)
        connection.execute("set timezone = 'UTC'; set datestyle = 'ISO'")
        connection.execute(
            "select set_config(name, '0', false) from pg_settings where name = any(%s)", [list(NO_LIMITS)]
        )
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(url: str) -> Connection:
    try:
        return psycopg.connect(
            url.replace("postgresql+asyncpg://", "postgresql://", 1),
            autocommit=True,
            row_factory=dict_row,
            connect_timeout=10,
            application_name=f"halfnote proof {socket.gethostname()[:32]}:{os.getpid()}",
            # Where the other side is gone without a word, a minute tells; a run may rest for longer than a firewall.
            keepalives_idle=30,
            keepalives_interval=10,
            keepalives_count=3,
        )
    except psycopg.Error as error:
        raise RunFailedError(f"The database cannot be reached: {first_line(error)}") from None


def _refuse_pooled(connection: Connection, url: str) -> None:
    """Raise RunFailedError behind a pooler of transactions or statements: locks and snapshots are of a session, and so
    are the settings that are made here.

    Two clients that get the same backend, one of them inside a transaction, share it, as does one who gets several.
    """
    before, another = _backend(connection), _opened(url)
    try:
        with another.transaction():
            other, after = _backend(another), _backend(connection)
        shared = before == other or before != after
    except psycopg.Error as error:
        # pgbouncer's words, where it pools statements.
        if "statement pooling mode" not in str(error):
            raise RunFailedError(f"The database cannot be reached: {first_line(error)}") from None
        shared = True
    finally:
        another.close()
    if shared:
        raise RunFailedError(
            "The database's URL leads to a transaction pooler (or one of statements); the proof and the archive keep "
            "sessions (locks, snapshots). Use a direct connection, or the pooler's session mode."
        )


def _backend(connection: Connection) -> int:
    row = connection.execute("select pg_backend_pid() as pid").fetchone()
    assert row is not None
    pid: int = row["pid"]
    return pid


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def only_run(url: str) -> Iterator[Connection]:
    """Lend the connection that writes, while this is the only run over its database.

    The lock belongs to the session: it ends with the connection, however the program ends. Raises RunFailedError, which
    says who is at it if another run is.
    """
    connection = connect(url)
    try:
        row = connection.execute("select pg_try_advisory_lock(%s) as taken", [RUN_LOCK]).fetchone()
        assert row is not None
        if not row["taken"]:
            raise BusyError(f"Another run is at it: {_holder(connection)}. Wait for its end, or end it.")
        yield connection
    finally:
        give_back(connection)


def give_back(connection: Connection) -> None:
    """Close a connection, its locks first: the server may see its end only later, and would refuse the next."""
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
    """The database as it was at one moment. Other sessions of the same server see it too, while this is open.

    `name`: what they import. `seen_at`: not later than the moment; a standby's is what it had replayed.
    """

    def __init__(self, connection: Connection, name: str, seen_at: datetime, *, standby: bool) -> None:
        self.connection = connection
        self.name = name
        self.seen_at = seen_at
        self.standby = standby

    def days(self) -> list[Day]:
        """Return the days that are not gone, oldest first."""
        return [Day(**row) for row in self.rows(DAYS)]

    def day(self, day: date) -> Day:
        """Return one of them; SnapshotLostError if it is gone."""
        for found in self.days():
            if found.day == day:
                return found
        raise SnapshotLostError(f"The day {day} is gone.")

    def rules(self) -> dict[str, float]:
        """Return shared_rule."""
        return {row["name"]: row["value"] for row in self.rows(RULES)}

    def lock(self, days: Iterable[date]) -> None:
        """Keep the days' tables from being dropped while the snapshot is open; upkeep waits 100 ms and tries later.

        Raises SnapshotLostError if one is dropped already: a new snapshot shows that the day is gone.
        """
        names = [partition_name(table, day) for day in days for table in schemas.BIG]
        if not names:
            return
        try:
            self.connection.execute(f"set local lock_timeout = '{LOCK_WAIT}'")
            self.connection.execute(f"lock table {', '.join(names)} in access share mode")
        except psycopg.errors.UndefinedTable as error:
            raise SnapshotLostError(f"A day left while the run began: {first_line(error)}") from None
        except psycopg.errors.LockNotAvailable:
            raise RunFailedError(f"Somebody holds a lock on a day's tables for more than {LOCK_WAIT}.") from None

    def signature(self, day: Day, rows: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return what tells whether a day changed, as JSON has it: its rows by table, what changed of subscriptions,
        how far the slowest has come, its archive. An `update` of rows of its own changes none of that.

        `rows`: how many its own tables have, if that is known; else they are counted, which reads each.
        """
        counted = {
            table: self.rows(f"select count(*) as rows from {partition_name(table, day.day)}")[0]["rows"]  # noqa: S608
            if rows is None
            else rows[table]
            for table in schemas.BIG
        }
        [subscriptions] = self.rows(SUBSCRIPTIONS)
        [slowest] = self.rows(REACHED.format(outbox=partition_name("outbox", day.day)))
        small = self.small_counts(day)
        return (
            counted
            | {table: small[table] for table in schemas.OF_DAY}
            | {"subscription": subscriptions["newest"], "archive": day.archive, "reached": slowest["reached"]}
            | {name: subscriptions[name] and subscriptions[name].isoformat() for name in ("changed", "deleted")}
        )

    def small_counts(self, day: Day) -> dict[str, int]:
        """Return how many rows of the day's ids each small table has, and how many all in all if it is read whole."""
        return {row["name"]: row["rows"] for row in self.rows(SMALL_COUNTS, {"low": day.low, "high": day.high})}

    def pages(self, relation: str) -> int:
        """Return how many pages hold all rows that the snapshot shows: whatever grows now, grows behind them."""
        size = "pg_relation_size(to_regclass(%s)) / current_setting('block_size')::bigint"
        pages: int = self.rows(f"select coalesce({size}, 0) as pages", [relation])[0]["pages"]
        return pages

    def standby_settings(self) -> StandbySettings | None:
        """Return what a standby lets readers do; None of a primary."""
        if not self.standby:
            return None
        row = self.rows(STANDBY)[0]
        return StandbySettings(row["feedback"], -1 if row["delay_s"] < 0 else row["delay_s"])

    def rows(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return what a statement finds in the snapshot."""
        return self.connection.execute(statement, parameters).fetchall()


@contextmanager
def open_snapshot(url: str) -> Iterator[Snapshot]:
    """Take a snapshot and hold it until the end of the block.

    Raises RunFailedError, and SnapshotLostError if the server ended the snapshot: to begin anew may help.
    """
    connection = connect(url)
    try:
        moment = connection.execute(MOMENT).fetchone()
        assert moment is not None
        connection.execute("begin transaction isolation level repeatable read read only")
        exported = connection.execute("select pg_export_snapshot() as name").fetchone()
        assert exported is not None
        yield Snapshot(connection, exported["name"], moment["seen_at"], standby=moment["standby"])
    except psycopg.Error as error:
        said = first_line(error)
        if cancelled_by_replay(said):
            raise SnapshotLostError(f"The standby cancelled a read: {said}") from None
        raise RunFailedError(f"The database failed while it was read: {said}") from error
    finally:
        connection.close()
