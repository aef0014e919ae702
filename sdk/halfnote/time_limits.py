"""Time limits of awaits."""

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, awaitable: Awaitable[T]) -> T:
    """Await for at most so many seconds. Raises asyncio.TimeoutError."""
    if sys.version_info >= (3, 11):
        # Without a task of its own, as `wait_for` of Python 3.11 has.
        async with asyncio.timeout(seconds):
            return await awaitable
    return await asyncio.wait_for(awaitable, seconds)
