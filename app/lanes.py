"""Group commit: requests queue in process and one lane flushes them, many to a database commit.

Invariants: a request is answered only after the commit that holds it; a batch holds an id at most once; the queue is
bounded; a caller that goes away does not take its batch along; one bad row fails alone; a commit whose outcome nobody
knows is called `outcome-unknown`, never a success and never a failure.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import asyncpg
import structlog

from app.database import Connection
from app.database_problems import BROKEN, GONE, READ_ONLY, RETRY_AFTER_S, ROW_ERRORS, Unconfirmed, problem_of
from app.errors import DatabaseUnavailable, Overloaded, Problem
from app.flush_timeout import FlushTimeout
from app.polling import Polling

log = structlog.get_logger(__name__)

# What a last flush gets when the lane is closed.
CLOSE_WITHIN_S = 1.0


class Identified(Protocol):
    """What a lane carries: anything that names its transaction."""

    @property
    def transaction_id(self) -> UUID: ...


R = TypeVar("R", bound=Identified)
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """How a lane gathers: rows in a flush, requests waiting, seconds to linger for company, seconds to a timeout.

    `poll_s`: the longest wait that one caller alone is polled through, see app/polling.py.
    """

    batch_max: int = 500
    queue_max: int = 10_000
    linger_s: float = 0.001
    flush_timeout_s: float = 10.0
    poll_s: float = 0.0


class Lane(Generic[R, Outcome]):
    """One queue, one connection, one flush at a time.

    `flush(connection, requests)` gets distinct ids, sorted, and returns one outcome each, in order. `follow(request,
    outcome)` answers a request from the outcome of the first with its id, or returns None to have it flushed next.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        flush: Callable[[Connection, Sequence[R]], Awaitable[Sequence[Outcome]]],
        follow: Callable[[R, Outcome], Outcome | None],
        limits: LaneLimits,
        observe: Callable[[int, float, int], None],
        polling: Polling | None = None,
    ) -> None:
        self._connect = connect
        self._flush = flush
        self._follow = follow
        self._limits = limits
        self._observe = observe
        self._polling = polling or Polling(limits.poll_s)
        self._queue: deque[tuple[R, asyncio.Future[Outcome]]] = deque()
        self._connection: Connection | None = None
        self._runner: asyncio.Task[None] | None = None
        # Who flushes its own request, with nobody else here.
        self._alone: asyncio.Task[Any] | None = None
        self._company = False
        self._warning: str | None = None
        self._timeout = FlushTimeout(limits.flush_timeout_s)

    @property
    def depth(self) -> int:
        """Requests that wait for a flush."""
        return len(self._queue)

    async def ask(self, request: R) -> Outcome:
        """Return a request's outcome after its commit; only for callers that nothing but a shutdown cancels.

        Who finds nobody else here flushes by itself, as a batch of one: the runner and a future would be two more turns
        of the event loop. Who comes meanwhile queues. Raises Problem.
        """
        if self._runner is not None or self._alone is not None or self._company or not self._is_connected():
            return await self.submit(request)
        self._alone = asyncio.current_task()
        self._polling.asked()
        try:
            outcomes, taken_s = await self._attempt([request])
        except Exception as error:
            raise self._refused([request], error)[0] from error
        finally:
            self._alone = None
            self._polling.answered()
            self._begin()
        # After whoever was answered just now: nobody need wait for a count.
        asyncio.get_running_loop().call_soon(self._observe, 1, taken_s, len(self._queue))
        return outcomes[0]

    def submit(self, request: R) -> "asyncio.Future[Outcome]":
        """Queue a request; the future resolves after its commit. Raises Overloaded when the queue is full."""
        if len(self._queue) >= self._limits.queue_max:
            raise Overloaded(
                f"{len(self._queue)} requests wait for the database already; repeat later.", retry_after_s=RETRY_AFTER_S
            )
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._queue.append((request, future))
        self._begin()
        return future

    def _begin(self) -> None:
        if self._queue and self._runner is None and self._alone is None:
            # Not in the context of whoever came first: a flush is for many.
            self._runner = asyncio.create_task(self._run(), context=Context())

    def give_up(self) -> None:
        """Answer whoever still waits: the flush under way is `outcome-unknown`, what is queued was not stored."""
        waiting = list(self._queue)
        self._queue.clear()
        self._fail(waiting, DatabaseUnavailable("The service is stopping; repeat later.", retry_after_s=RETRY_AFTER_S))
        self._drop()

    async def close(self) -> None:
        """Flush what is queued, then close the connection; a database that hangs is not waited for."""
        if self._alone is not None:
            await asyncio.wait([self._alone], timeout=CLOSE_WITHIN_S)
        if self._runner is not None:
            await asyncio.wait([self._runner], timeout=CLOSE_WITHIN_S)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self._drop()

    async def _run(self) -> None:
        try:
            if self._company and self._limits.linger_s:
                await asyncio.sleep(self._limits.linger_s)
            while self._queue:
                await self._flush_next()
        finally:
            self._runner = None

    async def _flush_next(self) -> None:
        """Take a batch, flush it, answer it, and answer or requeue those that asked for the same ids."""
        if len(self._queue) == 1:
            self._company = False
            self._polling.asked()
            await self._settle([self._queue.popleft()])
            self._polling.answered()
            return
        batch: dict[UUID, tuple[R, asyncio.Future[Outcome]]] = {}
        repeats: list[tuple[R, asyncio.Future[Outcome]]] = []
        while self._queue and len(batch) < self._limits.batch_max:
            entry = self._queue.popleft()
            if batch.setdefault(entry[0].transaction_id, entry) is not entry:
                repeats.append(entry)
        self._company = len(batch) > 1
        entries = [batch[key] for key in sorted(batch)]
        await self._settle(entries)
        for request, future in reversed(repeats):
            first = batch[request.transaction_id][1]
            answer = None if first.cancelled() or first.exception() else self._follow(request, first.result())
            if answer is None:
                self._queue.appendleft((request, future))
            elif not future.done():
                future.set_result(answer)

    async def _settle(self, entries: list[tuple[R, asyncio.Future[Outcome]]]) -> None:
        """Flush entries and resolve their futures; a bad row is found by halving and fails alone."""
        try:
            outcomes, taken_s = await self._attempt([request for request, _ in entries])
        except asyncpg.PostgresError as error:
            if error.sqlstate[:2] in ROW_ERRORS and len(entries) > 1:
                middle = len(entries) // 2
                await self._settle(entries[:middle])
                await self._settle(entries[middle:])
                return
            self._fail(entries, error)
        except Exception as error:
            self._fail(entries, error)
        else:
            for (_, future), outcome in zip(entries, outcomes, strict=True):
                if not future.done():
                    future.set_result(outcome)
            # After whoever was answered just now: nobody need wait for a count.
            asyncio.get_running_loop().call_soon(self._observe, len(entries), taken_s, len(self._queue))

    async def _attempt(self, requests: list[R]) -> tuple[Sequence[Outcome], float]:
        """Flush once on the lane's connection, within the timeout; raises what the database says.

        Returns the outcomes and the seconds it took.
        """
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = await self._ready()
        self._warning = None
        started = perf_counter()
        try:
            with self._timeout:
                outcomes = await self._flush(connection, requests)
        except asyncpg.PostgresError as error:
            if connection.is_closed() or error.sqlstate.startswith(GONE):
                self._drop()
                raise Unconfirmed(str(error)) from error
            if error.sqlstate in READ_ONLY:
                # After a failover the address may lead elsewhere, and a session may keep a read-only default.
                self._drop()
            raise
        except BROKEN as error:
            self._drop()
            raise Unconfirmed(str(error) or type(error).__name__) from error
        except BaseException:
            self._drop()
            raise
        if self._warning is not None:
            raise Unconfirmed(self._warning)
        return outcomes, perf_counter() - started

    async def _ready(self) -> Connection:
        try:
            connection = self._connection = await self._connect()
        except asyncpg.PostgresError:
            raise
        except BROKEN as error:
            raise DatabaseUnavailable(
                "The database cannot be reached; repeat later.", retry_after_s=RETRY_AFTER_S
            ) from error
        connection.add_log_listener(self._listen)
        return connection

    def _listen(self, connection: object, message: asyncpg.PostgresLogMessage) -> None:
        # A cancelled wait for a synchronous standby is a mere warning, and the statement still reports success.
        if getattr(message, "severity_en", None) == "WARNING" and getattr(message, "sqlstate", "") == "01000":
            self._warning = str(getattr(message, "message", "warning"))

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    def _is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    def _refused(self, requests: Sequence[R], error: Exception) -> list[Problem]:
        problems = [problem_of(error, request.transaction_id) for request in requests]
        if problems:
            log.warning("flush_failed", requests=len(requests), error=str(error), problem=problems[0].slug)
        return problems

    def _fail(self, entries: list[tuple[R, asyncio.Future[Outcome]]], error: Exception) -> None:
        problems = self._refused([request for request, _ in entries], error)
        for (_, future), problem in zip(entries, problems, strict=True):
            if not future.done():
                future.set_exception(problem)
                # Whoever asked may be gone; an exception nobody fetches is not news.
                future.exception()
