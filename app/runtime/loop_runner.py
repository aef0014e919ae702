"""Run loops: repeat a step, wait between steps, and retry a failed step with backoff."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Literal, Protocol

import structlog

from app.runtime.state import Runtime

log = structlog.get_logger(__name__)

LONGEST_BACKOFF_S = 10.0
# From the begin of a step to the begin of the next one, in multiples of the time that the step took.
REST_TIMES = 2


class Result(Protocol):
    """The result of a step. With `more` the next step follows at once, otherwise after `within_s` if it is sooner."""

    @property
    def more(self) -> bool: ...

    @property
    def within_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's result: how much it did, whether more is waiting, and when the next step is due before its time."""

    done: int = 0
    more: bool = False
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Loop:
    """A step that is taken every `every_s` seconds, or sooner if the last result asked for it.

    `wake` ends the wait early, but steps begin an interval apart, except that after a rest up to `burst` steps may
    follow each other at once. The interval is twice the time that the step took, so that a loop rests half of its time,
    within the bounds of `intervals_s`. A step that follows a result with `more` is not counted. `drain` is awaited once
    after the last step: it settles what is in flight and releases leases. `longest_backoff_s` bounds the wait after a
    failed step.
    """

    name: str
    step: Callable[[Runtime, datetime], Awaitable[Result]]
    every_s: float
    wake: asyncio.Event | None = None
    drain: Callable[[Runtime], Awaitable[None]] | None = None
    intervals_s: tuple[float, float] = (0.0, 0.0)
    burst: int = 1
    longest_backoff_s: float = LONGEST_BACKOFF_S


class Waits:
    """The waits of one loop: each for a time, or until the process stops, or until the loop is woken.

    Each event has one waiter, which is kept over many waits: to begin and cancel one takes longer than most steps.
    """

    def __init__(self, stopping: asyncio.Event, wake: asyncio.Event | None) -> None:
        self._wake = wake
        self._stopped = asyncio.create_task(stopping.wait())
        self._woken: asyncio.Task[Literal[True]] | None = None

    async def wait(self, seconds: float) -> None:
        """Wait until `stopping` or `wake` is set, for `seconds` at most."""
        if self._wake is not None and (self._woken is None or self._woken.done()):
            self._woken = asyncio.create_task(self._wake.wait())
        waiters = [self._stopped] if self._woken is None else [self._stopped, self._woken]
        await asyncio.wait(waiters, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    async def rest(self, seconds: float) -> None:
        """Wait until `stopping` is set, for `seconds` at most."""
        await asyncio.wait([self._stopped], timeout=seconds)

    def end(self) -> None:
        """End the waiters."""
        self._stopped.cancel()
        if self._woken is not None:
            self._woken.cancel()


async def run(loop: Loop, runtime: Runtime, stopping: asyncio.Event) -> None:
    """Take steps until `stopping` is set; the current step is finished first."""
    waits = Waits(stopping, loop.wake)
    try:
        await _repeat(loop, runtime, stopping, waits)
    finally:
        waits.end()
    if loop.drain is not None:
        await loop.drain(runtime)


async def _repeat(loop: Loop, runtime: Runtime, stopping: asyncio.Event, waits: Waits) -> None:
    # A first step that never ends counts as late, like any other.
    runtime.heartbeats[loop.name], runtime.every_s[loop.name] = monotonic(), loop.every_s
    backoff_s, log_due = 0.0, 0.0
    # When the steps so far would have ended, each with its interval (the generic cell rate algorithm, ITU-T I.371).
    used_until = monotonic()
    while not stopping.is_set():
        if loop.wake is not None:
            loop.wake.clear()
        began = monotonic()
        try:
            result = await loop.step(runtime, runtime.clock.now())
        except Exception as error:
            backoff_s = min(LONGEST_BACKOFF_S, max(0.2, backoff_s * 2))
            retry_s = min(backoff_s, loop.longest_backoff_s)
            # A loop that tries often during a long outage logs no more often than the others.
            if monotonic() >= log_due:
                log_due = monotonic() + backoff_s
                log.warning("loop_failed", loop=loop.name, error=str(error), kind=type(error).__name__, retry_s=retry_s)
            await waits.rest(retry_s)
            continue
        backoff_s, log_due = 0.0, 0.0
        runtime.heartbeats[loop.name] = ended = monotonic()
        interval_s = min(max(loop.intervals_s[0], REST_TIMES * (ended - began)), loop.intervals_s[1])
        if not result.more:
            within_s = loop.every_s if result.within_s is None else min(loop.every_s, result.within_s)
            await waits.wait(within_s)
            # The first wake-ups are followed at once; later ones within the interval share the next step.
            used_until = max(used_until, began) + interval_s
            remaining_s = used_until - (loop.burst - 1) * interval_s - monotonic()
            if remaining_s > 0 and not stopping.is_set():
                await waits.rest(remaining_s)


async def wait(seconds: float, stopping: asyncio.Event, wake: asyncio.Event | None) -> None:
    """Wait for `seconds`, or until `stopping` or `wake` is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in (stopping, wake) if event is not None]
    try:
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiter in waiting:
            waiter.cancel()
