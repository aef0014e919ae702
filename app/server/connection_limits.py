"""Limits on the connections of one process: time for a request to arrive, size of its head, number of connections.

uvicorn has no timeout for the first byte of a connection nor for the rest of a request, and no limit on a head. Its
`limit_concurrency` counts idle connections too, so a client that only connects makes uvicorn refuse all others.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

# The frames of a chunked body take bytes too. A request may take this many times the body limit.
FRAMING_FACTOR = 4
SWEEP_EVERY_S = 1.0
# Past the limit 1/20 of it is closed at once, so that not every new connection scans all others.
EVICTED_SHARE = 20
# Open files that the process needs besides connections: Postgres, callbacks, logs, the program itself.
OTHER_FILES = 512


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the web server: the settings of the same names (app/config.py)."""

    request_timeout_s: float = 30.0
    connections_max: int = 10_000
    body_limit_bytes: int = 4 * 1024 * 1024
    head_limit_bytes: int = 64 * 1024
    refusal_read_s: float = 2.0

    @property
    def request_max_bytes(self) -> int:
        """Bytes that a whole request may take on the wire."""
        return self.head_limit_bytes + FRAMING_FACTOR * self.body_limit_bytes


class Connection(Protocol):
    """A connection as the reaper sees it. Times are those of the event loop's clock.

    `deadline`: when the expected bytes of the client must have arrived (None: none are expected). `idle_since`: None
    while a request is in progress.
    """

    deadline: float | None
    idle_since: float | None
    has_sent_request: bool

    def give_up(self) -> None: ...


class ConnectionReaper:
    """Closes the connections of one server that are past their deadline, and the longest idle ones past the limit."""

    def __init__(self, connections: Collection[Connection], loop: asyncio.AbstractEventLoop) -> None:
        self._connections = connections
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def admit(self, newest: Connection, most: int) -> bool:
        """Return whether there is room for the newest connection, after idle ones were closed for it if needed."""
        self.begin()
        return len(self._connections) <= most or self.make_room(newest, most)

    def begin(self) -> None:
        """Sweep every second while there is a connection."""
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = self._loop.time()
        connections = list(self._connections)
        for connection in connections:
            if connection.deadline is not None and connection.deadline <= now:
                connection.give_up()
        if connections:
            self.begin()

    def make_room(self, newest: Connection, most: int) -> bool:
        """Close some idle connections, first those that never sent a request. Return whether there was one.

        The newest one has sent nothing yet. It would be closed before all that rest between requests.
        """
        idle = [one for one in self._connections if one.idle_since is not None and one is not newest]
        idle.sort(key=lambda one: (one.has_sent_request, one.idle_since))
        for one in idle[: max(1, most // EVICTED_SHARE)]:
            one.give_up()
        return bool(idle)


def most_connections(wanted: int) -> int:
    """Raise this process's limit of open files as far as allowed. Return how many connections fit in it."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - OTHER_FILES))
