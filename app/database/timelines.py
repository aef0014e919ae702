"""Refuse a former primary that comes back unfenced: a server whose timeline is older than one that was seen.

A promotion starts a new timeline (PostgreSQL documentation, 26.3.6 "Timelines"), so of two servers of one cluster the
server with the higher timeline was promoted later. A former primary that accepts writes again would acknowledge
transactions that its successor does not have.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TypeAlias
from urllib.parse import parse_qs, urlsplit
from weakref import WeakKeyDictionary

import asyncpg

from app.database.url_file import url_of

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
Host: TypeAlias = tuple[str, int]
# Opens a connection to one host of the URL, whether it takes writes or not.
ConnectHost: TypeAlias = Callable[[Host], Awaitable[Connection]]

DEFAULT_PORT = 5432

# The first eight hexadecimal digits of a WAL file's name are the timeline that the server writes. A standby writes
# none, so its last checkpoint says which timeline it follows.
READ = """
select (select system_identifier from pg_control_system()) as cluster, pg_is_in_recovery() as in_recovery,
  case when pg_is_in_recovery() then (select timeline_id from pg_control_checkpoint())
  else ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int end as number
"""
# Insufficient privilege, undefined function, feature not supported: services that speak the protocol of Postgres and
# have no timelines, or do not show them to every role.
UNREADABLE = ("42501", "42883", "0A000")


@dataclass(frozen=True, slots=True)
class LookTimes:
    """Seconds between two looks at all hosts of the URL, and the seconds that one host has to answer."""

    every_s: float = 5.0
    within_s: float = 2.0


class StaleServer(ConnectionError):
    """The server is a former primary, or belongs to another cluster. The text says what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A cluster's system identifier, which initdb draws at random, and the timeline of one of its servers."""

    cluster: int
    number: int
    # A standby takes no writes, and what it says may be older than the timeline that it follows.
    in_recovery: bool


class TimelineGuard:
    """The highest timeline that this process has seen, and the connections that were admitted on it.

    With one host in the URL the guard knows only what its own connections saw. With several it looks at all of them, so
    that also a process that was just started finds the promoted server.
    """

    def __init__(self, dsn: str, connect_host: ConnectHost, times: LookTimes) -> None:
        self._dsn = dsn
        self.times = times
        self.highest: Timeline | None = None
        self._connect_host = connect_host
        self._admitted: WeakKeyDictionary[Connection, Timeline] = WeakKeyDictionary()
        self._looked_at = -inf
        self._looking: asyncio.Task[None] | None = None
        # The hosts that did not answer the last look.
        self._silent: set[Host] = set()
        # Why no timeline can be read: then a former primary is not recognized.
        self.unreadable: str | None = None
        # Called once a higher timeline was seen, before this process runs a statement of its own there. A standby that
        # was behind has less than its former primary, and gives the same offsets, versions and epochs to other rows. So
        # each part of the process that keeps what it read has a function here that forgets it.
        self.on_promotion: list[Callable[[], None]] = []

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts of the URL. Raises BadUrlFile."""
        return hosts_of(url_of(self._dsn))

    @property
    def hosts_to_try(self) -> Sequence[Host]:
        """The hosts of the URL, with those at the end that did not answer the last look. Raises BadUrlFile."""
        return sorted(self.hosts, key=self._silent.__contains__)

    async def admit(self, connection: Connection) -> None:
        """Remember a connection's timeline.

        Raises StaleServer if its server takes writes on a timeline that is not the highest, or is of another cluster.
        """
        found = await self._read(connection)
        if found is None:
            return
        highest = self._raise_to(found)
        if found.cluster != highest.cluster or (found.number < highest.number and not found.in_recovery):
            raise StaleServer(_fault(found, highest))
        self._admitted[connection] = found

    def is_of_standby(self, connection: Connection) -> bool:
        """Return whether a connection's server was a standby. It may have been promoted since, which nothing shows."""
        timeline = self._admitted.get(connection)
        return timeline is not None and timeline.in_recovery

    async def look(self) -> None:
        """Read the timelines of all hosts of the URL, unless there is only one or the last look was recent.

        Hosts that do not answer are left out. Closes each admitted connection that turns out to be stale.
        """
        if len(self.hosts) < 2 or monotonic() - self._looked_at < self.times.every_s:
            return
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
            self._looking.add_done_callback(self._looked)
        # Callers share one look. A canceled caller does not end it for the others.
        await asyncio.shield(self._looking)

    async def close(self) -> None:
        """End a look that is in progress."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])

    def _looked(self, _: "asyncio.Task[None]") -> None:
        self._looking = None
        self._looked_at = monotonic()

    async def _look(self) -> None:
        for found in await asyncio.gather(*(self._timeline_of(host) for host in self.hosts)):
            if found is not None:
                self._raise_to(found)

    async def _timeline_of(self, host: Host) -> Timeline | None:
        try:
            async with asyncio.timeout(self.times.within_s):
                connection = await self._connect_host(host)
                try:
                    found = await self._read(connection)
                finally:
                    connection.terminate()
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
            self._silent.add(host)
            return None
        self._silent.discard(host)
        return found

    async def _read(self, connection: Connection) -> Timeline | None:
        try:
            row = await connection.fetchrow(READ)
        except asyncpg.PostgresError as error:
            if error.sqlstate not in UNREADABLE:
                raise
            self.unreadable = str(error)
            return None
        assert row is not None
        return Timeline(**row)

    def _raise_to(self, found: Timeline) -> Timeline:
        """Keep the higher of a timeline and the highest; return the highest.

        Closes the connections that became stale, and forgets what was read by them.
        """
        highest = self.highest
        if highest is not None and (found.cluster != highest.cluster or found.number <= highest.number):
            return highest
        self.highest = found
        for connection, timeline in list(self._admitted.items()):
            if timeline.number < found.number:
                # A commit in progress is answered `outcome-unknown`: the promoted server may not have it.
                connection.terminate()
        if highest is not None:
            # The timeline is known from now on, so an error must not leave the others uncalled.
            with ExitStack() as stack:
                for forget in reversed(self.on_promotion):
                    stack.callback(forget)
        return found


def _fault(found: Timeline, highest: Timeline) -> str:
    if found.cluster != highest.cluster:
        return (
            f"the server belongs to another cluster (system identifier {found.cluster}, before {highest.cluster}); "
            "if the database was moved there on purpose, restart Halfnote"
        )
    return (
        f"the server is on timeline {found.number}, and timeline {highest.number} was seen: it is a former primary "
        "that came back, or a restored copy. Stop it or make it a standby; if the database was restored on purpose, "
        "restart Halfnote"
    )


def hosts_of(dsn: str) -> Sequence[Host]:
    """Return the hosts that a `postgresql://` URL names, in order; none if it names a socket's directory or no host."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    hosts = parts.netloc.rpartition("@")[2] or query.get("host", [""])[0]
    ports = query.get("port", [""])[0].split(",")
    found = []
    for number, host in enumerate(hosts.split(",")):
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        port = port or (ports[number] if number < len(ports) else ports[0])
        if name and not name.startswith(("/", "%2F", "%2f")):
            found.append((name.strip("[]"), int(port or DEFAULT_PORT)))
    return found
