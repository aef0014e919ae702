"""Follows the accept switch, so that `PUT /accept` reaches every replica within a second."""

from datetime import datetime

from app.loops.runner import Turned
from app.runtime import Runtime
from app.store import switches

EVERY_S = 0.5


async def step(runtime: Runtime, now: datetime) -> Turned:
    """Read the switch and refuse or take new halves accordingly."""
    async with runtime.database.connection() as connection:
        switch = await switches.read(connection, switches.ACCEPT)
    runtime.follow_switch(switch.value if switch else "all")
    return Turned()
