"""Answers the checks of a producer group in the background, without an endpoint: as a task, and as a thread."""

import asyncio
import logging
import queue
import threading
from contextlib import suppress
from contextvars import ContextVar

from halfnote.async_driver import AsyncDriver
from halfnote.claiming import Claiming, paused_s
from halfnote.sync_driver import SyncDriver
from halfnote.time_limits import unless_stopped

log = logging.getLogger("halfnote")

# How long a claim waits for a check. A thread cannot end its request, so it waits less.
WAIT_S, SYNC_WAIT_S = 20, 4
# The one whose listener runs, also in tasks and threads of the listener.
_answering: "ContextVar[CheckAnswering | None]" = ContextVar("halfnote_answering", default=None)
FAILED = "checks could not be answered, which is tried again in %g s: %s"


class CheckAnswering:
    """Claims and answers checks in a task of the running event loop, until `stop` or the producer's `close`."""

    def __init__(self, claiming: Claiming, driver: AsyncDriver) -> None:
        self._claiming, self._driver = claiming, driver
        self._stopping = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._task = self.loop.create_task(self._work())

    @property
    def running(self) -> bool:
        """Whether checks are being answered."""
        return not self._task.done()

    async def stop(self, grace_s: float = 5.0) -> None:
        """Claim no more; give the answers that are under way `grace_s` seconds. Halfnote asks again for the others.

        Call it on its event loop, `loop`.
        """
        self._stopping.set()
        if _answering.get() is self:
            # A listener may close the producer; its answer follows.
            return
        try:
            await asyncio.wait([self._task], timeout=grace_s)
        finally:
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        _answering.set(self)
        failed, started = 0, True
        while not self._stopping.is_set():
            try:
                await self._turn(started)
                failed, started = 0, False
            except Exception as error:
                if self._stopping.is_set():
                    return
                failed += 1
                log.warning(FAILED, paused_s(failed, error), error)
                await self._pause(paused_s(failed, error))

    async def _turn(self, started: bool) -> None:
        claim = self._driver.run(self._claiming.claimed(WAIT_S, started=started))
        # A cancellation says that the time for the answers is over as well.
        checks = await unless_stopped(claim, self._stopping, stays_if_canceled=False)
        if checks is not None:
            await self._driver.run(self._claiming.answered(checks))

    async def _pause(self, seconds: float) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def is_over(one: CheckAnswering) -> bool:
    """Return whether nothing is left to stop: its loop is closed, its task has ended, or is canceled and ends."""
    return one.loop.is_closed() or not one.running or (one._stopping.is_set() and _answering.get() is not one)


class SyncCheckAnswering:
    """Claims and answers checks in a thread, until `stop` or the producer's `close`."""

    def __init__(self, claiming: Claiming, driver: SyncDriver) -> None:
        self._claiming, self._driver = claiming, driver
        # No Event: a signal's handler may stop it above the code that does, and would wait for the lock of that.
        self._is_stopping, self._stops = False, queue.SimpleQueue[None]()
        self._thread = threading.Thread(target=self._work, name="halfnote-checks", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether checks are being answered."""
        return self._thread.is_alive()

    def stop(self, grace_s: float = 5.0) -> None:
        """Claim no more; give the claim that waits and the answers under way `grace_s` seconds."""
        self._is_stopping = True
        self._stops.put(None)
        # A listener may close the producer; its answer follows.
        if threading.current_thread() is not self._thread:
            self._thread.join(grace_s)

    def _work(self) -> None:
        failed, started = 0, True
        while not self._is_stopping:
            try:
                checks = self._driver.run(self._claiming.claimed(SYNC_WAIT_S, started=started))
                self._driver.run(self._claiming.answered(checks))
                failed, started = 0, False
            except Exception as error:
                failed += 1
                if self._is_stopping:
                    return
                log.warning(FAILED, paused_s(failed, error), error)
                with suppress(queue.Empty):
                    self._stops.get(timeout=paused_s(failed, error))
