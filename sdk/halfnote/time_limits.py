"""Time limits of awaits."""

import asyncio
import sys
import time
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

# How long after its beginning a claim is given up at the earliest. By then, as a rule, what the service had is here,
# even over a long way, and the claim only waits: its answer is no more likely to be on its way than at any later time.
LOOKED_WITHIN_S = 0.5


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Await for at most so many seconds. Raises asyncio.TimeoutError."""
    if sys.version_info >= (3, 11):
        # Without a task of its own, as `wait_for` of Python 3.11 has.
        async with asyncio.timeout(seconds):
            return await awaitable
    return await asyncio.wait_for(awaitable, seconds)


async def unless_stopped(claim: Awaitable[T], stopping: asyncio.Event, *, stays_if_canceled: bool) -> T | None:
    """Return what a claim brings; give it up and return None if `stopping` is set first.

    What the service has handed out by then, and is on its way, would be missing until its time is over. So the answer
    may come until `LOOKED_WITHIN_S` seconds after the beginning. `stays_if_canceled`: that also holds if this is
    canceled; a second cancellation ends it at once. The service notices that a claim is given up, and gives back what
    it has handed out and not sent.
    """
    until = time.monotonic() + LOOKED_WITHIN_S
    claiming, stopped = asyncio.ensure_future(claim), asyncio.ensure_future(stopping.wait())
    try:
        try:
            await asyncio.wait([claiming, stopped], return_when=asyncio.FIRST_COMPLETED)
            await _done(claiming, until)
        except asyncio.CancelledError:
            if stays_if_canceled:
                await _done(claiming, until)
            raise
        return claiming.result() if claiming.done() else None
    finally:
        for task in (claiming, stopped):
            task.cancel()
        await asyncio.gather(claiming, stopped, return_exceptions=True)


async def _done(future: "asyncio.Future[T]", until: float) -> None:
    """Wait until a future is done, without its result, or the time has come."""
    if not future.done() and (left_s := until - time.monotonic()) > 0:
        await asyncio.wait([future], timeout=left_s)
