"""PURE: limit how many messages a second a subscription is sent."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

# Messages of this much time may be sent at once, to catch up after a late timer or a busy moment.
CATCH_UP_S = 0.1


class Pacer:
    """Spreads messages evenly at `rate_per_s` (GCRA: each message has a theoretical send time).

    Times are seconds of a clock that never steps. Over any span of t seconds at most `rate * (t + CATCH_UP_S) + 1`
    messages are allowed. `next_at`: when the next message may go, if an earlier limiter has said so.
    """

    def __init__(self, rate_per_s: float, next_at: float = float("-inf")) -> None:
        self._apart_s = 1.0 / rate_per_s
        self._next = next_at

    @property
    def next_at(self) -> float:
        """When the next message may go."""
        return self._next

    def wait_s(self, at: float) -> float:
        """Return the seconds that the next message must still wait; 0: it may go now."""
        return max(0.0, self._next - at)

    def room(self, at: float, most: int) -> int:
        """Return how many messages may go now, up to `most`."""
        if self._next > at:
            return 0
        start = max(self._next, at - CATCH_UP_S)
        return min(most, int((at - start) / self._apart_s) + 1)

    def sent(self, at: float, count: int) -> None:
        """Note that `count` messages are sent now; `room` must have allowed them."""
        self._next = max(self._next, at - CATCH_UP_S) + count * self._apart_s


class JointPacer:
    """Lets messages go as several pacers together allow it, each of which limits other messages as well.

    `pacers` returns those that count now. Without one nothing may go for `CATCH_UP_S`.
    """

    def __init__(self, pacers: Callable[[], Sequence[Pacer]]) -> None:
        self._pacers = pacers

    def wait_s(self, at: float) -> float:
        """Return the seconds that the next message must still wait; 0: it may go now."""
        return min((pacer.wait_s(at) for pacer in self._pacers()), default=CATCH_UP_S)

    def room(self, at: float, most: int) -> int:
        """Return how many messages may go now, up to `most`."""
        return min(most, sum(pacer.room(at, most) for pacer in self._pacers()))

    def sent(self, at: float, count: int) -> None:
        """Note that `count` messages are sent now; `room` must have allowed them."""
        for pacer in self._pacers():
            of_this = pacer.room(at, count)
            if of_this:
                pacer.sent(at, of_this)
                count -= of_this


AnyPacer: TypeAlias = Pacer | JointPacer
