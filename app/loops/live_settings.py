"""Reads API keys and declared topics again when admins change them, and records the last use of keys."""

from datetime import datetime, timedelta

import structlog

from app.runtime.live_settings import follow
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.admin import api_keys

log = structlog.get_logger(__name__)

# This interval plus the read stays below authenticator.KNOWN_WITHIN_S.
EVERY_S = 1.0
USED_EVERY = timedelta(minutes=1)
# The wait after the use of keys could not be recorded.
RETRY_AFTER = timedelta(seconds=10)


class LiveSettingsReader:
    """The loop's step. It remembers when it last recorded each key's use."""

    def __init__(self) -> None:
        self._noted: dict[int, datetime] = {}
        self._failed_at: datetime | None = None

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Read changes, and record the use of keys whose last record is a minute old."""
        await follow(runtime, now)
        return StepResult(await self._note_used(runtime, now))

    async def _note_used(self, runtime: Runtime, now: datetime) -> int:
        """Record what is due, and return how many keys it was.

        What cannot be recorded is left to a later step: a key that was revoked is refused no later for it.
        """
        if self._failed_at is not None and abs(now - self._failed_at) < RETRY_AFTER:
            return 0
        used = runtime.authenticator.used
        due = {one for one in used if one not in self._noted or now - self._noted[one] >= USED_EVERY}
        if not due:
            return 0
        try:
            async with runtime.database.connection() as connection:
                due -= await api_keys.note_used(connection, due, now)
        except Exception as error:
            self._failed_at = now
            log.warning("key_use_not_recorded", keys=len(due), error=str(error), kind=type(error).__name__)
            return 0
        self._failed_at = None
        self._noted.update(dict.fromkeys(due, now))
        used.difference_update(due)
        return len(due)
