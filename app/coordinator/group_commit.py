"""Group commit: requests queue in process, and one lane flushes many of them in one database commit.

Invariants:

- A request is answered only after the commit that holds it.
- A batch holds each id at most once.
- The queue is bounded.
- A canceled caller does not cancel its batch.
- A bad row fails alone. A request that fails after the commit of its batch fails alone, too.
- A commit without a confirmed outcome is answered `outcome-unknown`, never as a success and never as a failure.
- A lane that stops answers every request that it has, and takes none.
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

from app.database.backends import end_backends
from app.database.connection import Connection
from app.database.errors import BROKEN, GONE, READ_ONLY, RETRY_AFTER_S, ROW_ERRORS, Unconfirmed, problem_of
from app.database.standby_wait import canceled_wait
from app.errors import DatabaseUnavailable, Overloaded, Problem

log = structlog.get_logger(__name__)

# Seconds that the last flush gets when the lane closes.
CLOSE_WITHIN_S = 1.0
# Seconds that the server gets to end the backends of connections that a lane gave up.
END_WITHIN_S = 5.0
# So many connections that a lane gave up may wait for a synchronous standby; then it opens no other one.
WAITING_FOR_STANDBY_MAX = 4
# A lane stops lingering after so many turns of the event loop in which no request came.
QUIET_TURNS = 2


class Identified(Protocol):
    """A request of a lane: it names its transaction."""

    @property
    def transaction_id(self) -> UUID: ...


R = TypeVar("R", bound=Identified)
Outcome = TypeVar("Outcome")


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Limits of a lane: requests in a flush, requests that wait, most seconds to linger, seconds to a timeout."""

    batch_max: int = 500
    queue_max: int = 10_000
    linger_s: float = 0.001
    flush_timeout_s: float = 10.0


class GroupCommitLane(Generic[R, Outcome]):
    """One queue, one connection, one flush at a time.

    `flush(connection, requests)` gets distinct ids, sorted, and returns one outcome for each, in order. An exception in
    place of an outcome fails one request: the batch is committed already. A flush that raises fails the whole batch.
    `answer_repeat(request, outcome)` answers a request from the outcome of the first request with its id. It returns
    None to have the request flushed next. `observe(requests, seconds, waiting)` is called after each flush.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection]],
        flush: Callable[[Connection, Sequence[R]], Awaitable[Sequence[Outcome | Exception]]],
        answer_repeat: Callable[[R, Outcome], Outcome | None],
        limits: LaneLimits,
        observe: Callable[[int, float, int], None],
    ) -> None:
        self._connect = connect
        self._flush = flush
        self._answer_repeat = answer_repeat
        self._limits = limits
        self._observe = observe
        self._queue: deque[tuple[R, asyncio.Future[Outcome]]] = deque()
        self._connection: Connection | None = None
        # Those that the lane gave up, whose backends may still be there.
        self._dropped: list[Connection] = []
        # Python asks the system for the process id each time that the running loop is asked for.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: asyncio.Task[None] | None = None
        # The task of a lone caller that flushes its own request.
        self._lone_caller: asyncio.Task[Any] | None = None
        # Whether the last batch of the queue had more than one request.
        self._had_concurrency = False
        self._warning: str | None = None
        # Whether the lane takes and flushes nothing more.
        self._stopped = False

    @property
    def depth(self) -> int:
        """Number of requests that wait for a flush."""
        return len(self._queue)

    async def commit(self, request: R) -> Outcome:
        """Return a request's outcome after its commit. Raises Problem.

        Only for callers that nothing but a shutdown cancels. A lone caller flushes its request itself, as a batch of
        one: the runner and a future would cost two more turns of the event loop. Requests that arrive meanwhile queue.
        """
        if (
            self._runner is not None
            or self._lone_caller is not None
            or self._had_concurrency
            or not self._is_connected()
        ):
            return await self.enqueue(request)
        self._lone_caller = asyncio.current_task()
        try:
            outcomes, taken_s = await self._attempt([request])
        except Exception as error:
            raise self._problems([request], error)[0] from error
        finally:
            self._lone_caller = None
            self._start_runner()
        # Record metrics after the caller has its answer.
        asyncio.get_running_loop().call_soon(self._observe, 1, taken_s, len(self._queue))
        outcome = outcomes[0]
        if isinstance(outcome, Exception):
            raise self._problems([request], outcome)[0] from outcome
        return outcome

    def enqueue(self, request: R) -> "asyncio.Future[Outcome]":
        """Queue a request; the future resolves after its commit.

        Raises Overloaded when the queue is full, and DatabaseUnavailable once the lane has stopped.
        """
        if self._stopped:
            raise _stopping()
        if len(self._queue) >= self._limits.queue_max:
            raise Overloaded(
                f"{len(self._queue)} requests wait for the database already; repeat later.", retry_after_s=RETRY_AFTER_S
            )
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._queue.append((request, future))
        if self._runner is None:
            self._start_runner()
        return future

    def _start_runner(self) -> None:
        if self._queue and self._runner is None and self._lone_caller is None:
            # An empty context: a flush serves many requests, so it must not carry the first one's trace.
            self._runner = asyncio.create_task(self._run(), context=Context())

    def give_up(self) -> None:
        """Answer every request that waits. The flush in progress is `outcome-unknown`; queued ones were not stored."""
        self._stopped = True
        waiting = list(self._queue)
        self._queue.clear()
        self._fail(waiting, _stopping())
        self._drop()

    async def close(self) -> None:
        """Flush what is queued, then close the connection. A flush that hangs gets CLOSE_WITHIN_S, then `give_up`."""
        if self._lone_caller is not None:
            await asyncio.wait([self._lone_caller], timeout=CLOSE_WITHIN_S)
        if self._runner is not None:
            await asyncio.wait([self._runner], timeout=CLOSE_WITHIN_S)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        self.give_up()

    async def _run(self) -> None:
        try:
            if self._had_concurrency and self._limits.linger_s:
                await self._linger()
            while self._queue:
                await self._flush_next()
        finally:
            self._runner = None

    async def _linger(self) -> None:
        """Wait for the requests that are on their way, until none has come for QUIET_TURNS turns of the event loop.

        The callers of the last flush send their next requests within a few turns. A wait of a fixed time leaves them,
        the service and the database idle for most of it (decision 0040).
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.linger_s
        waiting = quiet = 0
        while quiet < QUIET_TURNS and loop.time() < until:
            quiet = quiet + 1 if len(self._queue) == waiting else 0
            waiting = len(self._queue)
            await asyncio.sleep(0)

    async def _flush_next(self) -> None:
        """Flush the next batch and answer it. Answer or requeue the requests that repeat an id of the batch."""
        if len(self._queue) == 1:
            self._had_concurrency = False
            entry = self._queue.popleft()
            await self._settle_all([entry], [])
            return
        # By number: the order of numbers is that of Postgres, and a UUID is hashed and compared in Python.
        batch: dict[int, tuple[R, asyncio.Future[Outcome]]] = {}
        repeats: list[tuple[R, asyncio.Future[Outcome]]] = []
        while self._queue and len(batch) < self._limits.batch_max:
            entry = self._queue.popleft()
            if batch.setdefault(entry[0].transaction_id.int, entry) is not entry:
                repeats.append(entry)
        self._had_concurrency = len(batch) > 1
        await self._settle_all([batch[number] for number in sorted(batch)], repeats)
        for request, future in reversed(repeats):
            first = batch[request.transaction_id.int][1]
            answer = None if first.cancelled() or first.exception() else self._answer_repeat(request, first.result())
            if answer is None and self._stopped:
                # The first one may be stored.
                self._fail([(request, future)], Unconfirmed("the lane has stopped"))
            elif answer is None:
                self._queue.appendleft((request, future))
            elif not future.done():
                future.set_result(answer)

    async def _settle_all(
        self,
        entries: list[tuple[R, asyncio.Future[Outcome]]],
        repeats: list[tuple[R, asyncio.Future[Outcome]]],
    ) -> None:
        """Flush entries. If the lane is closed meanwhile, their outcome and that of their repeats is unknown."""
        try:
            await self._settle(entries)
        except asyncio.CancelledError:
            left = [entry for entry in [*entries, *repeats] if not entry[1].done()]
            self._fail(left, Unconfirmed("the lane was closed during the flush"))
            raise

    async def _settle(self, entries: list[tuple[R, asyncio.Future[Outcome]]]) -> None:
        """Flush entries and resolve their futures. A bad row is found by halving the batch, and fails alone."""
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
            for entry, outcome in zip(entries, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    self._fail([entry], outcome)
                elif not entry[1].done():
                    entry[1].set_result(outcome)
            # Record metrics after the callers have their answers.
            asyncio.get_running_loop().call_soon(self._observe, len(entries), taken_s, len(self._queue))

    async def _attempt(self, requests: list[R]) -> tuple[Sequence[Outcome | Exception], float]:
        """Flush once on the lane's connection, within the timeout.

        Returns the outcomes and the seconds that the flush took. Raises Unconfirmed if the outcome is unknown, else
        what the database raises.
        """
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = await self._open()
        self._warning = None
        started = perf_counter()
        try:
            async with asyncio.timeout(self._limits.flush_timeout_s):
                outcomes = await self._flush(connection, requests)
        except asyncpg.PostgresError as error:
            if connection.is_closed() or error.sqlstate.startswith(GONE):
                self._drop()
                raise Unconfirmed(str(error)) from error
            if error.sqlstate in READ_ONLY:
                # After a failover the address may reach another server, and a session may keep a read-only default. Its
                # backend is idle, and ends by itself.
                self._drop(is_idle=True)
            raise
        except BROKEN as error:
            self._drop()
            raise Unconfirmed(str(error) or type(error).__name__) from error
        except BaseException as error:
            self._drop()
            if self._stopped and isinstance(error, Exception):
                # It met the end of the connection.
                raise Unconfirmed(str(error) or type(error).__name__) from error
            raise
        if self._warning is not None:
            raise Unconfirmed(self._warning)
        return outcomes, perf_counter() - started

    async def _open(self) -> Connection:
        """Connect. Raises DatabaseUnavailable, or what the database says of itself."""
        try:
            connection = await self._connect()
        except asyncpg.PostgresError as error:
            if error.sqlstate[:2] in ROW_ERRORS:
                # Of a setting of the connection, and of no row.
                raise _unreachable() from error
            raise
        except Exception as error:
            if not isinstance(error, BROKEN):
                log.error("lane_cannot_connect", exc_info=error)
            raise _unreachable() from error
        try:
            if self._dropped and not self._stopped:
                await self._end_dropped(connection)
            if self._stopped:
                raise _stopping()
        except BaseException:
            # The lane has no other reference to it.
            connection.terminate()
            raise
        self._connection = connection
        connection.add_log_listener(self._note_warning)
        return connection

    async def _end_dropped(self, asking: Connection) -> None:
        """End the backends of the connections that the lane gave up. Raises DatabaseUnavailable.

        A backend does not notice that its client is gone. One whose commit may wait for a synchronous standby is left.
        Without a limit each flush would leave one, until the server has no connection left.
        """
        try:
            async with asyncio.timeout(END_WITHIN_S):
                self._dropped = await end_backends(asking, self._dropped)
        except asyncpg.PostgresError as error:
            if asking.is_closed():
                raise _unreachable() from error
            # Such as a missing right. The lane works all the same.
            log.warning("backends_not_ended", backends=len(self._dropped), error=str(error))
            self._dropped = []
        except BROKEN as error:
            raise _unreachable() from error
        if len(self._dropped) >= WAITING_FOR_STANDBY_MAX:
            raise DatabaseUnavailable(
                "Commits wait in the database, as for a synchronous standby that is gone. Nothing of this request was "
                "stored; repeat later.",
                retry_after_s=RETRY_AFTER_S,
            )

    def _note_warning(self, connection: object, message: asyncpg.PostgresLogMessage) -> None:
        self._warning = canceled_wait(message) or self._warning

    def _drop(self, *, is_idle: bool = False) -> None:
        if self._connection is not None:
            self._connection.terminate()
            if not is_idle:
                self._dropped.append(self._connection)
            self._connection = None

    def _is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    def _problems(self, requests: Sequence[R], error: Exception) -> list[Problem]:
        problems = [problem_of(error, request.transaction_id) for request in requests]
        if problems:
            log.warning("flush_failed", requests=len(requests), error=str(error), problem=problems[0].slug)
        return problems

    def _fail(self, entries: list[tuple[R, asyncio.Future[Outcome]]], error: Exception) -> None:
        problems = self._problems([request for request, _ in entries], error)
        for (_, future), problem in zip(entries, problems, strict=True):
            if not future.done():
                future.set_exception(problem)
                # The caller may be gone. Reading the exception keeps asyncio from logging it as never retrieved.
                future.exception()


def _stopping() -> DatabaseUnavailable:
    return DatabaseUnavailable("The service is stopping; repeat later.", retry_after_s=RETRY_AFTER_S)


def _unreachable() -> DatabaseUnavailable:
    return DatabaseUnavailable("The database cannot be reached; repeat later.", retry_after_s=RETRY_AFTER_S)
