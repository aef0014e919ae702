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


def beat(runtime: Runtime) -> None:
    """Note that the loop gets on."""
    runtime.heartbeats[NAME] = monotonic()


@asynccontextmanager
async def beating(runtime: Runtime, connection: Connection, within_s: float) -> AsyncIterator[None]:
    """Beat every BEAT_EVERY_S while each statement of the connection ends within `within_s` seconds of the one before.

    A step that fails leaves the heartbeat as it was, and the next ones do not beat by the clock until one finishes:
    else a loop that fails again and again after a long statement would never be late. Raises what the block raises.
    """
    before, ended_at = runtime.heartbeats.get(NAME), monotonic()

    def note_end(_: object) -> None:
        nonlocal ended_at
        ended_at = monotonic()

    async def beat_by_the_clock() -> None:
        while True:
            await asyncio.sleep(BEAT_EVERY_S)
            if monotonic() - ended_at < within_s:
                beat(runtime)

    connection.add_query_logger(note_end)
    ticking = None if runtime.upkeep_failed else asyncio.create_task(beat_by_the_clock())
    runtime.upkeep_failed = True
    try:
        yield
        runtime.upkeep_failed = False
    finally:
        connection.remove_query_logger(note_end)
        if ticking is not None:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
        if runtime.upkeep_failed and before is not None:
            runtime.heartbeats[NAME] = before
