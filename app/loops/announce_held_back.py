"""Announces the messages that a rate limit held back: their count and the newest, once the limit's time is over."""

from datetime import datetime

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.relay.announcements import AT_ONCE, announce_withheld

EVERY_S = 5.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Announce the causes that are due. Concurrent replicas skip each other's rows."""
    async with runtime.database.transaction() as connection:
        written = await announce_withheld(connection, now)
    if written:
        runtime.wake_ups.published()
    return StepResult(written, more=written == AT_ONCE)
