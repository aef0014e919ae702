"""Connections outside the pool that requests of one kind share, each opened while the requests go on.

Invariants:

- At most `most` connections are in use, free or being opened.
- While a request waits, none is free.
- A request takes the first connection that is there: a new one, or one that another request gives back.
- A connection that cannot be opened fails a request only if there is no other one to wait for.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import Context

import structlog

from app.database.connection import Connection, Database, NoConnection, PoolBusy, is_left_open

log = structlog.get_logger(__name__)

# The pause after a connection that could not be opened, while others are in use.
OPEN_AGAIN_S = 0.5


class KeyedShare:
    """At most `most` connections for statements that look up rows by key: each keeps plans."""

    def __init__(self, database: Database, most: int) -> None:
        self._database = database
        self._most = most
        # The one that was used last at the end.
        self._free: list[Connection] = []
        self._in_use = 0
        self._opening: set[asyncio.Task[Connection]] = set()
        self._waiting: deque[asyncio.Future[Connection]] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._closed = False

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Lend a connection.

        Raises PoolBusy if all stay in use for `pool_timeout_s`, and NoConnection if there was none for it, and one
        could not be opened.
        """
        connection = await self._take()
        lent, guard = self._database.lent, self._database.guard
        lent.lend(connection)
        try:
            yield connection
        finally:
            lent.take_back(connection)
            if not connection.is_closed() and (is_left_open(connection) or guard.is_of_standby(connection)):
                connection.terminate()
            self._give_back(connection)

    async def close(self) -> None:
        """Close the connections that are free, and those in use when they are given back. Open no other one."""
        self._closed = True
        self._fail_waiting(NoConnection("the process ends"))
        if self._pause is not None:
            self._pause.cancel()
        opening = list(self._opening)
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in self._free:
            connection.terminate()
        self._free.clear()

    async def _take(self) -> Connection:
        until = asyncio.get_running_loop().time() + self._database.pool_timeout_s
        while True:
            if self._free:
                self._in_use += 1
                connection = self._free.pop()
            else:
                connection = await self._wait(until)
            if not connection.is_closed():
                return connection
            self._give_back(connection)

    async def _wait(self, until: float) -> Connection:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # It may be of long ago.
            self._failure = None
        waiting: asyncio.Future[Connection] = loop.create_future()
        self._waiting.append(waiting)
        self._open_for_waiting()
        try:
            await asyncio.wait([waiting], timeout=until - loop.time())
        except asyncio.CancelledError:
            if not waiting.done():
                self._waiting.remove(waiting)
            elif waiting.exception() is None:
                self._give_back(waiting.result())
            raise
        if waiting.done():
            return waiting.result()
        self._waiting.remove(waiting)
        within = f"within {self._database.pool_timeout_s:g} s"
        if self._in_use < self._most:
            raise NoConnection(f"no connection was opened {within}") from self._failure
        raise PoolBusy(f"requests use all of their database connections, and gave none back {within}")

    def _give_back(self, connection: Connection) -> None:
        """Hand a connection to who waits longest, or keep it. One that is closed makes room for another."""
        self._in_use -= 1
        if self._closed:
            connection.terminate()
        elif connection.is_closed():
            self._open_for_waiting()
        elif self._waiting:
            self._in_use += 1
            self._waiting.popleft().set_result(connection)
        else:
            self._free.append(connection)

    def _open_for_waiting(self) -> None:
        """Begin to open a connection for each request that waits and has none, as far as there is room."""
        if self._closed:
            self._fail_waiting(NoConnection("the process ends"))
        if self._pause is not None and self._in_use:
            return
        while len(self._opening) < len(self._waiting) and self._in_use + len(self._opening) < self._most:
            # An empty context: it may serve another request, so it must not carry the trace of this one.
            task = asyncio.create_task(self._database.dedicated(), context=Context())
            self._opening.add(task)
            task.add_done_callback(self._opened)

    def _opened(self, task: "asyncio.Task[Connection]") -> None:
        self._opening.discard(task)
        if task.cancelled():
            return
        failure = task.exception()
        if failure is not None:
            self._not_opened(failure)
            return
        self._failure = None
        self._in_use += 1
        self._give_back(task.result())

    def _not_opened(self, failure: BaseException) -> None:
        self._failure = failure
        reason = str(failure) or type(failure).__name__
        log.warning("connection_not_opened", in_use=self._in_use, waiting=len(self._waiting), error=reason)
        if self._in_use or self._opening:
            if self._pause is None:
                self._pause = asyncio.get_running_loop().call_later(OPEN_AGAIN_S, self._open_again)
            return
        self._fail_waiting(NoConnection(reason), failure)

    def _fail_waiting(self, error: NoConnection, cause: BaseException | None = None) -> None:
        """Fail each request that waits by an error of its own."""
        while self._waiting:
            own = NoConnection(*error.args)
            own.__cause__ = cause
            self._waiting.popleft().set_exception(own)

    def _open_again(self) -> None:
        self._pause = None
        self._open_for_waiting()
