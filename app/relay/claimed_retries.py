"""PURE: the messages of one stream that were claimed from delivery_retry and are not settled."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from app.store.relay.log import Outgoing
from app.store.relay.results import NOTE, Settlement


class ClaimedRetries:
    """A claim may run out before its message is sent: those of one key are sent one after another.

    Then the next claim finds the row once more. The message has that claim from then on, and is not sent twice.

    Invariant: no two messages of the same row.
    """

    def __init__(self) -> None:
        # By offset, with the end of the claim.
        self._held: dict[int, tuple[Outgoing, datetime]] = {}

    @property
    def keys(self) -> int:
        """How many keys have messages here; each message without a key counts as one."""
        messages = [message for message, _ in self._held.values()]
        return len({message.key for message in messages if message.key is not None}) + sum(
            message.key is None for message in messages
        )

    def take(self, messages: Iterable[Outgoing], until: datetime, now: datetime) -> list[Outgoing]:
        """Take messages that were claimed at `now` until a time; return those that are new to the stream."""
        new = []
        for message in messages:
            held, ends = self._held.get(message.offset, (None, now))
            # Before its end a row can be claimed only after a settle that gave it back, whose answer may be lost.
            if held is not None and ends <= now:
                held.claim = message.claim
            else:
                held = message
                new.append(message)
            self._held[message.offset] = held, until
        return new

    def settled(self, settlements: Sequence[Settlement]) -> None:
        """Forget the messages whose outcomes are recorded."""
        if not self._held:
            return
        for settlement in settlements:
            message = settlement.message
            held, _ = self._held.get(message.offset, (None, None))
            if held is message and settlement.result is not NOTE:
                del self._held[message.offset]
