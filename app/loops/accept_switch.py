"""Follows the accept switch, so that `PUT /accept` reaches every replica within about a second."""

from datetime import datetime

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.store.admin import switches

EVERY_S = 1.0


async def step(runtime: Runtime, now: datetime) -> StepResult:
    """Read the switch, and refuse or accept new halves accordingly."""
    async with runtime.database.keyed() as connection:
        switch = await switches.read(connection, switches.ACCEPT)
    runtime.follow_switch(switch.value if switch else "all")
    return StepResult()
