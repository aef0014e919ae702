"""Follows what admins change while the service runs: API keys and declared topics; and notes which keys are used."""

from datetime import datetime, timedelta

from app.following import follow
from app.loops.runner import Turned
from app.runtime import Runtime
from app.store import api_keys

# With the read itself this stays below gate.KNOWN_WITHIN_S.
EVERY_S = 1.0
USED_EVERY = timedelta(minutes=1)


class News:
    """The loop's step, which remembers when it last noted each key's use."""

    def __init__(self) -> None:
        self._noted: dict[int, datetime] = {}

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Follow changes, and note the keys that were used and not noted for a minute."""
        await follow(runtime, now)
        due = [one for one in runtime.gate.used if one not in self._noted or now - self._noted[one] >= USED_EVERY]
        if due:
            async with runtime.database.connection() as connection:
                await api_keys.note_used(connection, due, now)
            self._noted.update(dict.fromkeys(due, now))
            runtime.gate.used.difference_update(due)
        return Turned(len(due))
