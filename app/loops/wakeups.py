"""The loops of the wake-ups: telling other processes of publications, hearing theirs, and the relay that is woken."""

from datetime import datetime

from app.loops.relay import Relay
from app.loops.runner import Turned
from app.loops.stream import Stream
from app.runtime import Runtime
from app.wakeups import Interest

# A worker that lost its listening connection connects again within this; meanwhile its poll finds what there is.
LISTEN_EVERY_S = 5.0
TELL_EVERY_S = 5.0


async def tell(runtime: Runtime, now: datetime) -> Turned:
    """Tell other processes' relays of what was published here."""
    return Turned(int(await runtime.wake_ups.tell()))


async def listen(runtime: Runtime, now: datetime) -> Turned:
    """Hear what other processes publish."""
    await runtime.wake_ups.listen()
    return Turned()


class Woken:
    """The relay's step, which leaves behind what its streams take, so that nothing else wakes it."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._streams: list[Stream] | None = None

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Take the relay's step, then say what wakes it if its streams are others than before."""
        try:
            return await self._relay.step(runtime, now)
        finally:
            streams = list(self._relay.streams.values())
            if streams != self._streams:
                self._streams = streams
                runtime.wake_ups.interest = Interest.of(
                    topic for stream in streams for topic in stream.subscription.topics
                )
                # What was published since the new ones first read the log woke nobody.
                runtime.wake_ups.relay.set()
