"""The loops that wake relays: notify other processes of publications, listen for theirs, and step the relay."""

from datetime import datetime

from app.relay.loop import Relay
from app.relay.stream import Stream
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.topic_patterns import TopicPatterns

# A worker that lost its listening connection connects again within this time; until then it polls.
LISTEN_EVERY_S = 5.0
NOTIFY_EVERY_S = 5.0


async def notify(runtime: Runtime, now: datetime) -> StepResult:
    """Notify the relays of other processes that this process published."""
    return StepResult(int(await runtime.wake_ups.notify()))


async def listen(runtime: Runtime, now: datetime) -> StepResult:
    """Listen for the publications of other processes."""
    await runtime.wake_ups.listen()
    return StepResult()


class RelayWakeups:
    """The relay's step, which keeps the topics of its streams registered, so that no other topic wakes it."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._streams: list[Stream] | None = None

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Take the relay's step, then register the topics that wake it if its streams changed."""
        try:
            return await self._relay.step(runtime, now)
        finally:
            streams = list(self._relay.streams.values())
            if streams != self._streams:
                self._streams = streams
                runtime.wake_ups.interest = TopicPatterns(
                    pattern for stream in streams for pattern in stream.subscription.topics
                )
                # Publications since the new streams first read the log did not wake the relay.
                runtime.wake_ups.wake()
