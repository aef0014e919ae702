"""Passes on what this process publishes: the messages themselves to the relay of this machine, topics to the others.

The process of a half most often still has its messages in memory when they are committed, and then no relay of this
machine reads them from the log. A relay takes such messages only if they follow what it has read without a gap. It
reads everything else. So what is passed on here is a hint, as a wake-up is: nothing is lost with it.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from app.clock import Clock
from app.database.notifier import WakeUps
from app.store.relay.log import Logged, Outgoing

# Takes messages in the order of their offsets; returns whether no stream must read the log for them.
HandOver = Callable[[Sequence[Outgoing], datetime], bool]


class Publications:
    """What a process publishes, or what the API processes beside it have published. `relay` is set by the relay."""

    def __init__(self, wake_ups: WakeUps, clock: Clock) -> None:
        self.relay: HandOver | None = None
        self._wake_ups, self._clock = wake_ups, clock

    def published(self, topics: Collection[str], messages: Sequence[Logged], complete: bool) -> None:
        """Pass on what a flush of this process published, after its commit.

        `complete`: the messages are all that was published, and not only some of it.
        """
        if self._wake_ups.worker is not None:
            self._wake_ups.published(topics, messages, complete)
        else:
            self.received(topics, messages, complete)

    def received(self, topics: Collection[str] | None, messages: Sequence[Logged], complete: bool) -> None:
        """Give messages to this process's relay, and wake the relays that must read the log."""
        taken = False
        if messages and self.relay is not None:
            taken = self.relay([Outgoing(*message) for message in messages], self._clock.now())
        self._wake_ups.published(topics, taken=taken and complete)
