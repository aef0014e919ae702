"""The one way to Postgres: SQLAlchemy's pool of asyncpg connections, each as durable as the contract promises."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import TypeAlias

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import QueuePool

from app.database.array_encoding import ask_by_type
from app.database.array_types import KnowingConnection
from app.database.backends import Backend, end_backends, note_backend
from app.database.keepalive import ON_THE_SERVER, keep_alive
from app.database.lent_connections import LentConnections
from app.database.standby_wait import CONFIRM, uncanceled_waits
from app.database.timelines import Host, LookTimes, StaleServer, TimelineGuard
from app.database.url_file import url_of

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

OLDEST_SERVER = (15,)
# Others lack characters, or take any bytes for text, as SQL_ASCII does.
ENCODING = "UTF8"
# Weaker settings let a commit be acknowledged before it is on disk; stronger ones are the operator's to choose.
WEAK_COMMITS = ("off", "local", "remote_write")

# For statements that only look up rows by key. Planning them again costs more than running them. A plan that was
# made while a day was empty is kept until the day is analyzed, a minute later: it must not scan what is full by then.
KEYED_PLANS = "set plan_cache_mode = force_generic_plan; set enable_seqscan = off"


IDLE_IN_TRANSACTION = "idle_in_transaction_session_timeout"
# The server ends a connection of the service that is silent for so long inside a database transaction. A process that
# is frozen, or gone behind a pooler, would keep its locks, and the offset lock stops every commit.
SILENT_IN_TRANSACTION_S = 10

# Not among the settings that a connection begins with: a pooler refuses those that it does not know.
# In a stricter level, which a database or a role may have, a statement fails instead of waiting for another's change.
SESSION = f"""
select current_setting('synchronous_commit') as commits, a.pid, a.backend_start as began_at
from set_config('jit', 'off', false),
  set_config('default_transaction_isolation', 'read committed', false) as isolation,
  {", ".join(f"set_config('{name}', '{value}', false) as {name}" for name, value in ON_THE_SERVER.items())},
  set_config('{IDLE_IN_TRANSACTION}', coalesce($1, current_setting('{IDLE_IN_TRANSACTION}')), false) as silent
  left join pg_stat_activity a on a.pid = pg_backend_pid()
"""  # noqa: S608 -- constants

# What a statement meets whose session became another's between two messages, and what pgbouncer says of a transaction
# where it pools statements.
NO_SESSION = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
NO_TRANSACTIONS = "statement pooling mode"

ask_by_type()

# A host that fails so is passed over for the next one of the URL.
NOT_CONNECTED = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
# When all hosts fail, the first of these says most.
TELLING = (StaleServer, asyncpg.PostgresError, OSError)

# How long a server is asked to end the backends of connections that are closed. A frozen one does not answer.
END_WITHIN_S = 5
# Connections of the pool that requests leave to the loops and to `readyz`.
LOOP_CONNECTIONS = 3
# Connections outside the pool that keep plans, above all for the relay: one reads the log while the other settles.
KEYED_CONNECTIONS = 2


class PoolBusy(TimeoutError):
    """All connections of the pool, or of a share of it, stayed in use for `pool_timeout_s`."""


class NoConnection(ConnectionError):
    """No connection was opened for a request: it failed, for the reason in `__cause__`, or took too long."""


class UnusableDatabase(Exception):
    """The database cannot serve Halfnote as it is; the text says what to change."""


def timeline_guard(dsn: str, times: LookTimes | None = None) -> TimelineGuard:
    """Return a guard for the connections to a URL."""

    times = times or LookTimes()

    async def connect_host(host: Host) -> Connection:
        name, port = host
        return await asyncpg.connect(
            url_of(dsn), host=name, port=port, target_session_attrs=SessionAttribute.any, timeout=times.within_s
        )

    return TimelineGuard(dsn, connect_host, times)


async def connect(
    dsn: str,
    *,
    timeout_s: float = 10.0,
    guard: TimelineGuard | None = None,
    keeps_plans: bool = False,
    answer_within_s: float | None = None,
    silent_in_transaction_s: float | None = None,
) -> Connection:
    """Open one connection in UTC and read committed, with `synchronous_commit` at least `on`.

    JIT is off, because hot statements are short.

    `dsn`: a URL, or `file:` and the path of a file that contains it now.
    `timeout_s`: for one host, from the first packet to the last statement that prepares the session.
    `guard`: what this process has seen of the servers' timelines; by default a guard of this connection alone.
    `keeps_plans`: for statements that look up rows by key.
    `answer_within_s`: for each statement; one that takes longer is canceled and raises TimeoutError.
    `silent_in_transaction_s`: between two statements of a database transaction, before the server ends it with the
    connection; None: as the server has it, for commands that may take their time.

    Raises StaleServer if every server that takes writes is a former primary, and OSError, asyncpg.PostgresError,
    asyncpg.InterfaceError, asyncpg.InternalClientError or TimeoutError as asyncpg does.
    """
    guard = guard or timeline_guard(dsn)
    session = KEYED_PLANS if keeps_plans else ""
    silent = None if silent_in_transaction_s is None else f"{silent_in_transaction_s * 1000:.0f}"
    await guard.look()
    # asyncpg itself has one limit for all hosts, which one that does not answer uses up, and it returns the first that
    # takes writes.
    failed: list[Exception] = []
    for host in guard.hosts_to_try if len(guard.hosts) > 1 else [None]:
        try:
            return await _connect(dsn, host, timeout_s, guard, session, answer_within_s, silent)
        except NOT_CONNECTED as error:
            failed.append(error)
    raise min(failed, key=_telling)


def _telling(error: Exception) -> int:
    return next((rank for rank, kind in enumerate(TELLING) if isinstance(error, kind)), len(TELLING))


async def _connect(
    dsn: str,
    host: Host | None,
    timeout_s: float,
    guard: TimelineGuard,
    session: str,
    answer_within_s: float | None,
    silent: str | None,
) -> Connection:
    name, port = host or (None, None)
    settings = {"application_name": "halfnote", "timezone": "UTC"}
    # Around all of it: a pooler answers the login itself, and the first statement when it has a server.
    async with asyncio.timeout(timeout_s):
        connection = await asyncpg.connect(
            url_of(dsn),
            host=name,
            port=port,
            timeout=timeout_s,
            command_timeout=answer_within_s,
            server_settings=settings,
            connection_class=KnowingConnection,
        )
        try:
            # asyncpg has no setting for it.
            keep_alive(connection._transport.get_extra_info("socket"))  # type: ignore[attr-defined]
            session_row = await connection.fetchrow(SESSION, silent)
            assert session_row is not None
            if session_row["commits"] in WEAK_COMMITS:
                await connection.execute("set synchronous_commit = on")
            if session_row["began_at"] is not None:
                note_backend(connection, Backend(session_row["pid"], session_row["began_at"]))
            await guard.admit(connection)
            if session:
                await connection.execute(session)
        except BaseException:
            # No other code has a reference to it yet.
            connection.terminate()
            raise
    return connection


class Database:
    """A bounded pool over one Postgres. `connection()` is autocommit; `transaction()` commits at its end.

    `lent`: its connections that are in use, but for those of `dedicated`.

    No function takes a second connection while it holds one: as many such functions as the pool has connections would
    wait for each other.
    """

    def __init__(
        self, dsn: str, *, pool_size: int, pool_timeout_s: float = 10.0, look_times: LookTimes | None = None
    ) -> None:
        self.dsn = dsn
        self.pool_timeout_s = pool_timeout_s
        self.guard = timeline_guard(dsn, look_times)
        self.lent = LentConnections()
        self.engine: AsyncEngine = create_async_engine(
            "postgresql+asyncpg://",
            async_creator=lambda: connect(dsn, guard=self.guard, silent_in_transaction_s=SILENT_IN_TRANSACTION_S),
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=pool_timeout_s,
            # jsonb stays text, as on the connections outside the pool: who reads a column decodes it.
            json_deserializer=str,
        )
        # Free ones, the one that was used last at the end; and how many there are with those that are lent.
        self._keyed: list[Connection] = []
        self._keyed_open = 0

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend one raw asyncpg connection; a broken one is replaced first and never goes back to the pool.

        Raises PoolBusy, and what connecting raises.
        """
        try:
            async with self.engine.connect() as pooled:
                raw = await _alive(pooled)
                self.lent.lend(raw)
                try:
                    yield raw
                finally:
                    self.lent.take_back(raw)
                    if raw.is_closed() or is_left_open(raw) or self.guard.is_of_standby(raw):
                        await pooled.invalidate()
        except PoolTimeout as error:
            raise PoolBusy("all connections of the pool are in use") from error

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Lend one connection inside a database transaction."""
        async with self.connection() as raw, raw.transaction():
            yield raw

    @asynccontextmanager
    async def keyed(self) -> AsyncIterator[Connection]:
        """Lend a connection for statements that look up rows by key: it keeps their plans.

        While KEYED_CONNECTIONS are in use, it is one of the pool. Raises as `connection` does.
        """
        kept = await self._take_keyed()
        if kept is None:
            async with self.connection() as pooled:
                yield pooled
            return
        self.lent.lend(kept)
        try:
            yield kept
        finally:
            self.lent.take_back(kept)
            if not kept.is_closed() and (is_left_open(kept) or self.guard.is_of_standby(kept)):
                kept.terminate()
            if kept.is_closed():
                self._keyed_open -= 1
            else:
                self._keyed.append(kept)

    async def _take_keyed(self) -> "Connection | None":
        """Return a connection that keeps plans, a new one if none is free; None if as many as there may be are lent."""
        while self._keyed:
            kept = self._keyed.pop()
            if not kept.is_closed():
                return kept
            self._keyed_open -= 1
        if self._keyed_open >= KEYED_CONNECTIONS:
            return None
        self._keyed_open += 1
        try:
            return await self.dedicated()
        except BaseException:
            self._keyed_open -= 1
            raise

    async def dedicated(self, *, answer_within_s: float | None = None) -> Connection:
        """Open a connection outside the pool that is kept, as by a lane. `answer_within_s`: see `connect`."""
        return await connect(
            self.dsn,
            guard=self.guard,
            keeps_plans=True,
            answer_within_s=answer_within_s,
            silent_in_transaction_s=SILENT_IN_TRANSACTION_S,
        )

    async def close_overdue(self) -> int:
        """Look at what is lent; close what is in use for too long, with its backend if the server answers.

        Return how many were closed. Those whose commit waits for a synchronous standby stay: the server is there, and
        another connection would only wait beside them.
        """
        overdue = self.lent.overdue()
        for connection in await self._end_backends(overdue) if overdue else []:
            self.lent.lend_longer(connection)
        # The end of its backend may have closed one already. One may have been given back meanwhile, and is left.
        closed = [one for one in overdue if one.is_closed() or self.lent.is_overdue(one)]
        for connection in closed:
            connection.terminate()
        return len(closed)

    async def _end_backends(self, connections: Sequence[Connection]) -> Sequence[Connection]:
        try:
            async with asyncio.timeout(END_WITHIN_S):
                asking = await connect(self.dsn, guard=self.guard)
                try:
                    # Others were given back while the server did not answer, and may be lent again.
                    return await end_backends(asking, [one for one in connections if self.lent.is_overdue(one)])
                finally:
                    asking.terminate()
        except (*NOT_CONNECTED, TimeoutError):
            return []

    @property
    def connections_in_use(self) -> int:
        """The number of pool connections that are lent now."""
        pool = self.engine.pool
        assert isinstance(pool, QueuePool)
        return pool.checkedout()

    async def close(self) -> None:
        """Close every pooled connection, and those that keep plans and are free."""
        for kept in self._keyed:
            kept.terminate()
        self._keyed_open -= len(self._keyed)
        self._keyed.clear()
        await self.guard.close()
        await self.engine.dispose()


async def _in_turn(free: asyncio.Semaphore, within_s: float) -> None:
    """Wait for one of the connections that requests of a kind share. Raises PoolBusy."""
    try:
        async with asyncio.timeout(within_s):
            await free.acquire()
    except TimeoutError as error:
        raise PoolBusy("requests use all of their database connections") from error


class PoolShare:
    """A part of a Database's pool: lends at most `most` of its connections at once."""

    def __init__(self, database: Database, most: int) -> None:
        self._database = database
        self._free = asyncio.Semaphore(most)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection, as Database.connection does.

        Raises PoolBusy after `pool_timeout_s`, and NoConnection if one cannot be opened.
        """
        await _in_turn(self._free, self._database.pool_timeout_s)
        try:
            async with AsyncExitStack() as stack:
                try:
                    connection = await stack.enter_async_context(self._database.connection())
                except PoolBusy:
                    raise
                except (*NOT_CONNECTED, TimeoutError) as error:
                    raise NoConnection(str(error) or type(error).__name__) from error
                yield connection
        finally:
            self._free.release()

    @asynccontextmanager
    async def transaction(self, *, dry_run: bool = False, confirmed: bool = True) -> AsyncIterator[Connection]:
        """Lend one connection inside a database transaction; a dry run is rolled back.

        `confirmed`: its end waits for a synchronous standby, also if it only read what others wrote. Raises PoolBusy,
        and if `confirmed` WaitCanceled, when the transaction is committed here and perhaps on no standby.
        """
        async with self.connection() as connection:
            transaction = connection.transaction()
            if not dry_run:
                with uncanceled_waits(connection) if confirmed else nullcontext():
                    async with transaction:
                        yield connection
                        if confirmed:
                            await connection.execute(CONFIRM)
                return
            await transaction.start()
            try:
                yield connection
            finally:
                if not connection.is_closed():
                    await transaction.rollback()


def is_left_open(connection: Connection) -> bool:
    """Return whether work that was interrupted has left a database transaction open, or may have.

    The next one to get the connection would work in it, and nothing would be committed. While the statement that begins
    one is under way, only asyncpg's own mark says so: the server has not answered.
    """
    return connection.is_in_transaction() or getattr(connection, "_top_xact", None) is not None


async def _alive(pooled: AsyncConnection) -> Connection:
    """Return the asyncpg connection behind a pooled one, after replacing those that died while they rested."""
    while True:
        fairy = await pooled.get_raw_connection()
        raw: Connection | None = fairy.driver_connection
        if raw is not None and not raw.is_closed():
            return raw
        await pooled.invalidate()


async def refuse_unusable(dsn: str) -> None:
    """Raise UnusableDatabase for a server that is too old or behind a transaction pooler, or a database not of UTF8.

    Leases and LISTEN need a session of one's own. Two clients that are given the same backend, one of them inside a
    transaction, have a transaction pooler between them and Postgres.
    """
    try:
        pooled = await _shares_sessions(dsn)
    except NO_SESSION:
        pooled = True
    except asyncpg.ConnectionDoesNotExistError as error:
        if NO_TRANSACTIONS not in str(error):
            raise
        pooled = True
    if pooled:
        raise UnusableDatabase(
            "HALFNOTE_DATABASE_URL leads to a transaction pooler (or one of statements); Halfnote keeps sessions "
            "(LISTEN, leases). Use a direct connection, or the pooler's session mode."
        )


async def _refuse_server(connection: Connection) -> None:
    """Raise UnusableDatabase for a server that is too old, or a database that is not of UTF8."""
    if connection.get_server_version() < OLDEST_SERVER:
        raise UnusableDatabase("Halfnote needs Postgres 15 or newer; this server is older. Upgrade it.")
    encoding = await connection.fetchval("select current_setting('server_encoding')")
    if encoding != ENCODING:
        raise UnusableDatabase(
            f"The database's encoding is {encoding}; Halfnote needs {ENCODING}, and a database keeps the one that it "
            f"was made with. Make another, `create database halfnote encoding '{ENCODING}' locale 'C' template "
            "template0`, bring over what this one holds by pg_dump, and name it by HALFNOTE_DATABASE_URL."
        )


async def _shares_sessions(dsn: str) -> bool:
    """Return whether two clients get the same backend, or one gets several. Raises as `_refuse_server`."""
    first = await connect(dsn)
    try:
        await _refuse_server(first)
        before = await first.fetchval("select pg_backend_pid()")
        second = await connect(dsn)
        try:
            async with second.transaction():
                other = await second.fetchval("select pg_backend_pid()")
                after = await first.fetchval("select pg_backend_pid()")
        finally:
            await second.close()
    finally:
        await first.close()
    return bool(before == other or before != after)
