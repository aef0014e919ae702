"""What one process bears of those who connect: how long a request takes to arrive, how long its head is, how many
connections there are.

uvicorn waits for ever for the first byte of a connection and for the rest of a request, takes heads without end, and
its `limit_concurrency` counts connections that rest: so anybody who only connects could have all others refused.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

# Of a request's first line and headers together; what arrives with it in one read is not cut.
HEAD_MAX_BYTES = 64 * 1024
# A chunked body's frames take room too; past so many bodies' worth there is more frame than body.
BODIES_WORTH = 4
SWEEP_EVERY_S = 1.0
# What is closed at once when there are too many, so that not each new connection looks at all others.
EVICTED_SHARE = 20
# Files that the process needs besides connections: Postgres, callbacks, logs, the program itself.
OTHER_FILES = 512


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """How patient the web server is."""

    request_timeout_s: float = 30.0
    connections_max: int = 10_000
    body_limit_bytes: int = 4 * 1024 * 1024

    @property
    def request_max_bytes(self) -> int:
        """What a whole request may take on the wire."""
        return HEAD_MAX_BYTES + BODIES_WORTH * self.body_limit_bytes


class Connection(Protocol):
    """A connection as it is swept. `late_at`: when what is awaited of the client must have come (None: nothing is)."""

    late_at: float | None
    rests_since: float | None
    spoke: bool

    def give_up(self) -> None: ...


class Sweeper:
    """Closes the connections of one server that are late, and those that rest longest when there are too many."""

    def __init__(self, connections: Iterable[Connection], loop: asyncio.AbstractEventLoop) -> None:
        self._connections = connections
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Sweep every second as long as there is a connection."""
        if self._timer is None:
            self._timer = self._loop.call_later(SWEEP_EVERY_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        now = self._loop.time()
        connections = list(self._connections)
        for connection in connections:
            if connection.late_at is not None and connection.late_at <= now:
                connection.give_up()
        if connections:
            self.begin()

    def make_room(self, most: int) -> bool:
        """Close some that rest; those that never asked anything go first. Return whether there were any."""
        resting = [one for one in self._connections if one.rests_since is not None]
        resting.sort(key=lambda one: (one.spoke, one.rests_since))
        for one in resting[: max(1, most // EVICTED_SHARE)]:
            one.give_up()
        return bool(resting)


def most_connections(wanted: int) -> int:
    """Raise this process's limit of open files as far as it may, and return how many connections it then allows."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(16, min(wanted, soft - OTHER_FILES))
