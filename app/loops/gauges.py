"""Publishes what only the database knows: who is in doubt or parked, what is dead, and what holds old days."""

from datetime import datetime

from app.loops.runner import Turned
from app.runtime import Runtime
from app.store import days
from app.store.dead_letters import dead_letters_of
from app.store.gauges import undecided

EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Set the gauges."""
    async with runtime.database.connection() as connection:
        found = await undecided(connection)
        held = await days.held_days(connection)
        dead = await dead_letters_of(connection)
    metrics = runtime.metrics
    metrics.in_doubt.set(found.in_doubt)
    metrics.parked.set(found.parked)
    oldest = found.oldest_born_at
    metrics.oldest_in_doubt_s.set(max(0.0, (now - oldest).total_seconds()) if oldest else 0.0)
    metrics.show_held({(day.day.isoformat(), cause) for day in held for cause in day.held})
    metrics.show_dead_letters(dead)
    return Turned(done=1)
