"""The heartbeat of upkeep. A day can take many minutes, and the loop is not late while it gets on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from app.database.connection import Connection
from app.runtime.state import Runtime

NAME = "upkeep"
# Much shorter than the time after which a loop is late.
BEAT_EVERY_S = 30.0


# So many steps in a row may fail before the next ones do not beat. Otherwise a loop that always fails after some
# progress would never be late.
FAILED_MOST = 2


def beat(runtime: Runtime) -> None:
    """Note that the loop gets on, unless its steps have failed repeatedly."""
    if runtime.upkeep_failures < FAILED_MOST:
        runtime.heartbeats[NAME] = monotonic()


@asynccontextmanager
async def beating(runtime: Runtime, connection: Connection, within_s: float) -> AsyncIterator[None]:
    """Beat every BEAT_EVERY_S while each statement of the connection ends within `within_s` seconds of the one before.

    Raises what the block raises, and counts it as a failed step.
    """
    ended_at = monotonic()

    def note_end(_: object) -> None:
        nonlocal ended_at
        ended_at = monotonic()

    async def beat_by_the_clock() -> None:
        while True:
            await asyncio.sleep(BEAT_EVERY_S)
            if monotonic() - ended_at < within_s:
                beat(runtime)

    connection.add_query_logger(note_end)
    ticking = asyncio.create_task(beat_by_the_clock())
    try:
        yield
    except Exception:
        runtime.upkeep_failures += 1
        raise
    else:
        runtime.upkeep_failures = 0
    finally:
        connection.remove_query_logger(note_end)
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
