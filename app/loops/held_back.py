"""Announces what its rate limit held back, once the limit's time is over: how many there were, and the newest."""

from datetime import datetime

from app.loops.runner import Turned
from app.runtime import Runtime
from app.store.announcements import AT_ONCE, announce_held_back

EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Announce what is due; replicas that do it at once leave each other's rows alone."""
    async with runtime.database.transaction() as connection:
        written = await announce_held_back(connection, now)
    if written:
        runtime.wake_ups.published()
    return Turned(written, more=written == AT_ONCE)
