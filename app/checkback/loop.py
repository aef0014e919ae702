"""The check-back loop: claim what is due, send checks to producers, settle their answers.

A step claims and starts checks, which run concurrently, so a group that hangs delays no other group. Finished checks
are settled in batches: while one batch is written, the next one collects.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

import asyncpg
import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.checkback.body_memory import BodyMemory
from app.checkback.check import Check, FinishedCheck
from app.checkback.check_batches import ask_batch, batches_of
from app.checkback.group_feedback import GroupFeedback
from app.checkback.settle import settle_batch
from app.database.connection import Connection
from app.errors import Problem
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.checkback.check_urls import note_urls
from app.store.checkback.claimed_checks import give_back
from app.store.checkback.claims import (
    CheckCapacity,
    Claim,
    any_due,
    asked_groups,
    asked_messages,
    claim,
    take_turn,
)
from app.store.checkback.results import adjust, release

log = structlog.get_logger(__name__)

# While no transaction is in doubt, and while there is no room. The sweep that finds one, and a check that is settled,
# wake the loop.
EVERY_S = 1.0
# While any is, which a producer or another worker may make due.
IN_DOUBT_EVERY_S = 0.5
# The shortest time from one look for due checks to the next, unless a sweep or a settled check wakes the loop.
SOON_S = 0.2
# Each group may have this many checks in flight, however full the process is.
RESERVED = 4
# The most that reservations add to HALFNOTE_CHECK_CONCURRENCY; the sum stays below the HTTP client's connections.
BEYOND = 256
BATCH_MAX = 500
# The longest wait before a batch that the database did not take is tried again.
LONGEST_BACKOFF_S = 2.0
# SQLSTATE classes of temporary errors: connection, read-only, deadlock, resources, lock not available, shutdown, disk.
TEMPORARY = ("08", "25", "40", "53", "55", "57", "58")
# The share of the drain's time for checks in flight; the rest is for settling and releasing.
DRAIN_SHARE = 0.6


class CheckBack:
    """The checks of one process that are in flight, or finished and not settled. `wake` is set when there is room."""

    def __init__(self, bodies: BodyMemory | None = None) -> None:
        self.wake = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], list[Claim]] = {}
        self._finished: list[FinishedCheck] = []
        self._settler: asyncio.Task[None] | None = None
        self._in_flight: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._feedback = GroupFeedback()
        self._bodies = bodies or BodyMemory()

    @property
    def in_flight(self) -> int:
        """Checks that are claimed and not settled."""
        return self._in_flight.total()

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Claim as much as there is room for and start the checks; return before their answers."""
        concurrency = runtime.settings.check_concurrency
        capacity = CheckCapacity(
            self._in_flight, concurrency - self.in_flight, RESERVED, concurrency + BEYOND - self.in_flight
        )
        if capacity.hard <= 0:
            return StepResult()
        async with runtime.database.keyed() as connection:
            due, next_at = await any_due(connection, capacity, now)
            if not due:
                if next_at is None:
                    return StepResult()
                return StepResult(within_s=min(IN_DOUBT_EVERY_S, max(SOON_S, (next_at - now).total_seconds())))
            async with connection.transaction():
                await take_turn(connection)
                claims, removed = await claim(connection, capacity, now)
            self._in_flight.update(one.producer_group for one in claims)
            try:
                checks = await self._prepared(connection, claims)
            except BaseException:
                # Their leases expire; no check was sent.
                self._in_flight = +(self._in_flight - Counter(one.producer_group for one in claims))
                raise
        for batch in batches_of(checks):
            batch = self._in_turn(batch)
            task = asyncio.create_task(self._run(runtime, batch))
            self._tasks[task] = [check.claim for check in batch]
            task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return StepResult(len(claims) + removed, more=removed > 0, within_s=SOON_S)

    async def settle_all(self) -> None:
        """Wait until every check in flight is finished and settled."""
        while self._tasks or self._settler is not None:
            waiting = [*self._tasks, *([self._settler] if self._settler else [])]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def drain(self, runtime: Runtime) -> None:
        """Settle the checks that finish in time, cancel the others and release their leases for other replicas.

        A check that is released does not count as unanswered, so policy does not wait longer for it. If the database
        does not release them, their leases expire.
        """
        within_s = runtime.settings.drain_s * DRAIN_SHARE
        try:
            async with asyncio.timeout(within_s):
                await self.settle_all()
        except TimeoutError:
            pass  # the leases of the others are released below
        left = dict(self._tasks)
        canceled = [*left, *([self._settler] if self._settler else [])]
        for task in canceled:
            task.cancel()
        await asyncio.gather(*canceled, return_exceptions=True)
        claims = [one for claims in left.values() for one in claims]
        # The database did not take these.
        claims += [one.check.claim for one in self._finished]
        leases = {(one.transaction_id, one.epoch) for one in claims}
        if leases:
            try:
                async with runtime.database.connection() as connection:
                    await release(connection, sorted(leases))
            except Exception as error:
                log.warning("checks_not_released", checks=len(leases), error=repr(error))
                return
        log.info("checks_drained", released=len(leases))

    async def _prepared(self, connection: Connection, claims: Sequence[Claim]) -> list[Check]:
        if not claims:
            return []
        groups = await asked_groups(connection, list({one.producer_group for one in claims}))
        messages = await asked_messages(connection, [one.transaction_id for one in claims], bodies=False)
        return [
            Check(one, group, messages.get(one.transaction_id, ()), group.check_urls if group is not None else ())
            for one in claims
            for group in [groups.get(one.producer_group)]
        ]

    def _in_turn(self, batch: list[Check]) -> list[Check]:
        """Return what one call asks, with the group's URLs in rotation: each call starts with the next one."""
        name, urls = batch[0].claim.producer_group, batch[0].urls
        if len(urls) < 2:
            return batch
        first = self._turns[name] % len(urls)
        self._turns[name] = first + 1
        turned = [*urls[first:], *urls[:first]]
        return [replace(check, urls=turned) for check in batch]

    async def _run(self, runtime: Runtime, checks: list[Check]) -> None:
        try:
            finished = await ask_batch(runtime, checks, self._bodies)
        except Exception as error:
            await self._give_back(runtime, checks, error)
            return
        self._finished += finished
        if self._settler is None:
            self._settler = asyncio.create_task(self._settle(runtime))

    async def _give_back(self, runtime: Runtime, checks: list[Check], error: Exception) -> None:
        """Make checks due again whose bodies could not be read; if this fails too, their leases expire."""
        claims = [check.claim for check in checks]
        log.warning("checks_not_sent", checks=len(claims), producer_group=claims[0].producer_group, error=repr(error))
        try:
            async with runtime.database.connection() as connection:
                await give_back(connection, claims, runtime.clock.now())
        except Exception as failure:
            log.warning("checks_not_released", checks=len(claims), error=repr(failure))
        finally:
            self._in_flight = +(self._in_flight - Counter(one.producer_group for one in claims))
            self.wake.set()

    async def _settle(self, runtime: Runtime) -> None:
        """Settle batches until none is left; retry with backoff while the database is unavailable."""
        backoff_s = 0.0
        try:
            while self._finished:
                batch = self._next_batch()
                try:
                    await self._settle_batch(runtime, batch)
                except Exception as error:
                    self._finished[:0] = batch
                    backoff_s = min(LONGEST_BACKOFF_S, max(0.1, backoff_s * 2))
                    log.warning("checks_not_settled", checks=len(batch), error=str(error), retry_s=backoff_s)
                    await asyncio.sleep(backoff_s)
                    continue
                except asyncio.CancelledError:
                    self._finished[:0] = batch
                    raise
                backoff_s = 0.0
                self._in_flight = +(self._in_flight - Counter(one.check.claim.producer_group for one in batch))
                self.wake.set()
        finally:
            self._settler = None

    def _next_batch(self) -> list[FinishedCheck]:
        """Take the checks that have waited longest, at most one of each transaction.

        While the database is away for longer than a lease, a transaction is claimed and asked again. Its later check
        is settled in a later batch, as if another process had asked it.
        """
        batch: dict[UUID, FinishedCheck] = {}
        left = []
        for place, one in enumerate(self._finished):
            if len(batch) == BATCH_MAX:
                left += self._finished[place:]
                break
            if batch.setdefault(one.check.claim.transaction_id, one) is not one:
                left.append(one)
        self._finished[:] = left
        return list(batch.values())

    async def _settle_batch(self, runtime: Runtime, batch: list[FinishedCheck]) -> None:
        """Settle a batch. A check that cannot be stored is found by halving, logged and left to its lease's expiry."""
        try:
            await settle_batch(runtime, batch)
        except Exception as error:
            if _is_temporary(error):
                raise
            if len(batch) == 1:
                log.error("check_not_settled", transaction_id=str(batch[0].check.claim.transaction_id), exc_info=error)
                return
            middle = len(batch) // 2
            await self._settle_batch(runtime, batch[:middle])
            await self._settle_batch(runtime, batch[middle:])
            return
        await self._write_feedback(runtime, batch)

    async def _write_feedback(self, runtime: Runtime, batch: list[FinishedCheck]) -> None:
        """Write the state of URLs and windows after a settled batch. A failure is only logged."""
        now = runtime.clock.now()
        urls = self._feedback.url_changes(batch, now)
        adjustments = self._feedback.adjustments(batch, now)
        if not urls and not adjustments:
            return
        try:
            async with runtime.database.connection() as connection:
                if urls:
                    await note_urls(connection, urls)
                if adjustments:
                    await adjust(connection, adjustments)
        except Exception as error:
            log.warning("groups_not_adjusted", groups=len(adjustments), urls=len(urls), error=str(error))


def _is_temporary(error: Exception) -> bool:
    """Return whether the database is unavailable or busy, rather than unable to store one of the rows."""
    if isinstance(error, asyncpg.PostgresError):
        return error.sqlstate[:2] in TEMPORARY
    if isinstance(error, Problem):
        return error.status == 503
    return isinstance(error, asyncpg.InterfaceError | SQLAlchemyError | OSError | TimeoutError)
