"""Check-back: claim what is due, ask its producers, settle what they say. One object of these runs in each worker.

A step claims and starts; the asking goes on beside it, so a group that hangs holds up nobody but itself. What comes
back is settled in batches: whatever has finished while the last batch was being written.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import datetime

import asyncpg
import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.database import Connection
from app.errors import Problem
from app.loops.check_acts import Check, Finished, act
from app.loops.check_groups import Learning
from app.loops.check_settling import settle_batch
from app.loops.runner import Turned
from app.runtime import Runtime
from app.store.check_claims import (
    AskedGroup,
    Claim,
    Room,
    any_due,
    asked_groups,
    asked_messages,
    claim,
    take_turn,
)
from app.store.check_settles import adjust, release
from app.store.check_urls import note_urls

log = structlog.get_logger(__name__)

EVERY_S = 0.2
# However full the process is, a group has this many checks in flight before it must wait for others.
RESERVED = 4
# What reservations may add to HALFNOTE_CHECK_CONCURRENCY in all; together they stay below the client's connections.
BEYOND = 256
BATCH_MAX = 500
# How long a batch that the database did not take waits before it is tried again, at most.
LONGEST_BACKOFF_S = 2.0
# Classes of errors that go by: connection, read-only, deadlock, resources, lock not available, shutdown, disk.
AWAY = ("08", "25", "40", "53", "55", "57", "58")
# The part of the drain that checks in flight may use; the rest is for settling and releasing.
DRAIN_PART = 0.6


class CheckBack:
    """The checks of one process: in flight, finished and not settled. `wake` is set when there is room again."""

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self._acts: dict[asyncio.Task[None], Claim] = {}
        self._finished: list[Finished] = []
        self._settler: asyncio.Task[None] | None = None
        self._mine: Counter[str] = Counter()
        self._turns: Counter[str] = Counter()
        self._learning = Learning()

    @property
    def in_flight(self) -> int:
        """Checks that are claimed and not settled."""
        return self._mine.total()

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Claim what there is room for and start to ask; returns before the answers."""
        concurrency = runtime.settings.check_concurrency
        room = Room(self._mine, concurrency - self.in_flight, RESERVED, concurrency + BEYOND - self.in_flight)
        if room.hard <= 0:
            return Turned()
        async with runtime.database.connection() as connection:
            if not await any_due(connection, room, now):
                return Turned()
            async with connection.transaction():
                await take_turn(connection)
                claims, removed = await claim(connection, room, now)
            self._mine.update(one.producer_group for one in claims)
            try:
                checks = await self._prepared(connection, claims)
            except BaseException:
                # Their leases run out; nobody was asked.
                self._mine = +(self._mine - Counter(one.producer_group for one in claims))
                raise
        for check in checks:
            task = asyncio.create_task(self._act(runtime, check))
            self._acts[task] = check.claim
            task.add_done_callback(lambda done: self._acts.pop(done, None))
        return Turned(len(claims) + removed, more=removed > 0)

    async def settle_all(self) -> None:
        """Wait until everything in flight has been asked and settled."""
        while self._acts or self._settler is not None:
            waiting = [*self._acts, *([self._settler] if self._settler else [])]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def drain(self, runtime: Runtime) -> None:
        """Settle what comes back soon, give up the rest and release its leases: other replicas ask again."""
        within_s = runtime.settings.drain_s * DRAIN_PART
        try:
            async with asyncio.timeout(within_s):
                await self.settle_all()
        except TimeoutError:
            pass  # what is left is released below
        left = dict(self._acts)
        given_up = [*left, *([self._settler] if self._settler else [])]
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        leases = [(one.transaction_id, one.epoch) for one in left.values()]
        if leases:
            async with runtime.database.connection() as connection:
                await release(connection, leases)
        log.info("checks_drained", released=len(leases))

    async def _prepared(self, connection: Connection, claims: Sequence[Claim]) -> list[Check]:
        if not claims:
            return []
        groups = await asked_groups(connection, list({one.producer_group for one in claims}))
        messages = await asked_messages(connection, [one.transaction_id for one in claims])
        return [
            Check(one, group, messages.get(one.transaction_id, ()), self._urls(group))
            for one in claims
            for group in [groups.get(one.producer_group)]
        ]

    def _urls(self, group: AskedGroup | None) -> list[str]:
        """Return a group's URLs, beginning with another one each time."""
        if group is None:
            return []
        first = self._turns[group.name] % len(group.check_urls)
        self._turns[group.name] = first + 1
        return group.check_urls[first:] + group.check_urls[:first]

    async def _act(self, runtime: Runtime, check: Check) -> None:
        self._finished.append(await act(runtime, check))
        if self._settler is None:
            self._settler = asyncio.create_task(self._settle(runtime))

    async def _settle(self, runtime: Runtime) -> None:
        """Settle batches until nothing is finished; a database that is away is tried again, later and later."""
        backoff_s = 0.0
        try:
            while self._finished:
                batch = self._finished[:BATCH_MAX]
                del self._finished[:BATCH_MAX]
                try:
                    await self._settle_batch(runtime, batch)
                except Exception as error:
                    self._finished[:0] = batch
                    backoff_s = min(LONGEST_BACKOFF_S, max(0.1, backoff_s * 2))
                    log.warning("checks_not_settled", checks=len(batch), error=str(error), retry_s=backoff_s)
                    await asyncio.sleep(backoff_s)
                    continue
                backoff_s = 0.0
                self._mine = +(self._mine - Counter(one.check.claim.producer_group for one in batch))
                self.wake.set()
        finally:
            self._settler = None

    async def _settle_batch(self, runtime: Runtime, batch: list[Finished]) -> None:
        """Settle a batch; one that cannot be stored is found by halving, logged, and left to its lease's end."""
        try:
            await settle_batch(runtime, batch)
        except Exception as error:
            if _away(error):
                raise
            if len(batch) == 1:
                log.error("check_not_settled", transaction_id=str(batch[0].check.claim.transaction_id), exc_info=error)
                return
            middle = len(batch) // 2
            await self._settle_batch(runtime, batch[:middle])
            await self._settle_batch(runtime, batch[middle:])
            return
        await self._learn(runtime, batch)

    async def _learn(self, runtime: Runtime, batch: list[Finished]) -> None:
        """Write what a settled batch taught of its groups; if that fails, the next batch teaches it again."""
        now = runtime.clock.now()
        news = self._learning.url_news(batch, now)
        adjustments = self._learning.adjustments(batch, now)
        if not news and not adjustments:
            return
        try:
            async with runtime.database.connection() as connection:
                if news:
                    await note_urls(connection, news)
                if adjustments:
                    await adjust(connection, adjustments)
        except Exception as error:
            log.warning("groups_not_adjusted", groups=len(adjustments), urls=len(news), error=str(error))


def _away(error: Exception) -> bool:
    """Tell whether the database is away or busy, rather than that it cannot store one of the rows."""
    if isinstance(error, asyncpg.PostgresError):
        return error.sqlstate[:2] in AWAY
    if isinstance(error, Problem):
        return error.status == 503
    return isinstance(error, asyncpg.InterfaceError | SQLAlchemyError | OSError | TimeoutError)
