"""Reads API keys and declared topics again when admins change them, and records the last use of keys."""

from datetime import datetime, timedelta

from app.runtime.live_settings import follow
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.admin import api_keys

# This interval plus the read stays below authenticator.KNOWN_WITHIN_S.
EVERY_S = 1.0
USED_EVERY = timedelta(minutes=1)


class LiveSettingsReader:
    """The loop's step. It remembers when it last recorded each key's use."""

    def __init__(self) -> None:
        self._noted: dict[int, datetime] = {}

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Read changes, and record the use of keys whose last record is a minute old."""
        await follow(runtime, now)
        due = [
            one for one in runtime.authenticator.used if one not in self._noted or now - self._noted[one] >= USED_EVERY
        ]
        if due:
            async with runtime.database.connection() as connection:
                await api_keys.note_used(connection, due, now)
            self._noted.update(dict.fromkeys(due, now))
            runtime.authenticator.used.difference_update(due)
        return StepResult(len(due))
