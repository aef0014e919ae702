"""PURE: when a subscription's destination counts as down, and when it is asked again."""

from collections.abc import Hashable, Sized
from datetime import datetime, timedelta

# One poison message must never open the breaker: this many different ones must have failed since the last success.
MESSAGES = 5
# Where no connection comes about no message is to blame; this many in a row are enough.
UNREACHABLE = 3
FIRST_PROBE = timedelta(seconds=1)
# The longest rest between two probes, and the longest that a destination's `Retry-After` may ask for.
LONGEST_PROBE = timedelta(seconds=30)
LONGEST_ASKED = timedelta(minutes=5)


class Breaker:
    """Closed, it watches outcomes; open, it lets one probe through now and then. `opened_at` tells which.

    While it is open nothing but probes is sent, and no failure uses up a try: an outage buries no message. Every probe
    should be another message, so that a poison one cannot keep it open.
    """

    def __init__(self, opened_at: datetime | None = None, because: str | None = None) -> None:
        self.opened_at, self.because = opened_at, because
        self._failed: set[Hashable] = set()
        self._unreachable = 0
        self._probes = 0
        self._asked = timedelta(0)
        self._probed_at: datetime | None = None

    @property
    def open(self) -> bool:
        """Whether only probes may be sent."""
        return self.opened_at is not None

    def succeeded(self) -> bool:
        """Note that the destination took a message; return whether this closed the breaker."""
        self._failed.clear()
        self._unreachable = self._probes = 0
        closed, self.opened_at, self.because = self.open, None, None
        return closed

    def failed(
        self, message: Hashable, error: str, now: datetime, *, unreachable: bool, retry_after_s: float | None = None
    ) -> bool:
        """Note a failure that is not known to be the message's fault; return whether this opened the breaker."""
        asked = timedelta(seconds=retry_after_s or 0)
        self._asked = min(LONGEST_ASKED, asked)
        if self.open:
            return False
        self._failed.add(message)
        self._unreachable = self._unreachable + 1 if unreachable else 0
        if len(self._failed) < MESSAGES and self._unreachable < UNREACHABLE:
            return False
        self.opened_at, self._probed_at = now, now
        many = f"{len(self._failed)} different messages failed in a row"
        self.because = f"{'no connection' if self._unreachable >= UNREACHABLE else many}: {error}"
        self._failed.clear()
        return True

    def wait(self, now: datetime) -> timedelta:
        """Return how long it is until the next probe may go out; zero: now. For an open breaker."""
        if self._probed_at is None:
            return timedelta(0)
        rest = max(self._asked, min(LONGEST_PROBE, FIRST_PROBE * 2 ** min(self._probes, 10)))
        passed = now - self._probed_at
        # A clock that stepped must not put it off.
        return timedelta(0) if passed >= rest or passed < timedelta(0) else rest - passed

    def prefers_retries(self, others: Sized) -> bool:
        """Tell whether the next probe should be a retry rather than one of the others, so that both have their turn."""
        return not len(others) or self._probes % 2 == 1

    def probing(self, now: datetime) -> None:
        """Note that a probe goes out."""
        self._probed_at = now
        self._probes += 1
