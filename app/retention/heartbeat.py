"""The heartbeat of upkeep. A day can take many minutes, and the loop is not late while it gets on."""

from time import monotonic

from app.runtime.state import Runtime

NAME = "upkeep"


def beat(runtime: Runtime) -> None:
    """Note that the loop gets on."""
    runtime.heartbeats[NAME] = monotonic()
