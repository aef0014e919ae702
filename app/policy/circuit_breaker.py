"""PURE: the circuit breaker of a destination: when it counts as down, and when the next probe is sent."""

from collections.abc import Hashable, Sized
from datetime import datetime, timedelta

# One poison message must not open the breaker: this many different messages must fail since the last success.
MESSAGES = 5
# Without a connection no message is at fault, so this many failures in a row are enough.
UNREACHABLE = 3
FIRST_PROBE = timedelta(seconds=1)
# The longest time between two probes, and the longest that a destination's `Retry-After` may ask for.
LONGEST_PROBE = timedelta(seconds=30)
LONGEST_RETRY_AFTER = timedelta(minutes=5)


class Breaker:
    """Closed, it counts failures; open (`opened_at` is set), it allows one probe at a time.

    While it is open only probes are sent, and no failure uses up a try, so an outage makes no dead letter. Every probe
    should be another message, so that a poison message cannot keep it open.
    """

    def __init__(self, opened_at: datetime | None = None, because: str | None = None) -> None:
        self.opened_at, self.because = opened_at, because
        self._failed: set[Hashable] = set()
        self._unreachable = 0
        self._probes = 0
        self._retry_after = timedelta(0)
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
        """Note a failure that may be the destination's fault; return whether this opened the breaker."""
        retry_after = timedelta(seconds=retry_after_s or 0)
        self._retry_after = min(LONGEST_RETRY_AFTER, retry_after)
        if self.open:
            return False
        self._failed.add(message)
        self._unreachable = self._unreachable + 1 if unreachable else 0
        if len(self._failed) < MESSAGES and self._unreachable < UNREACHABLE:
            return False
        self.opened_at, self._probed_at = now, now
        self.because = self._cause(error)
        self._failed.clear()
        return True

    def _cause(self, error: str) -> str:
        if self._unreachable < UNREACHABLE:
            return f"{len(self._failed)} different messages failed in a row: {error}"
        # Most such errors say it themselves.
        return error if error.startswith("no connection") else f"no connection: {error}"

    def wait(self, now: datetime) -> timedelta:
        """Return the time until an open breaker's next probe may be sent; zero: now."""
        if self._probed_at is None:
            return timedelta(0)
        pause = max(self._retry_after, min(LONGEST_PROBE, FIRST_PROBE * 2 ** min(self._probes, 10)))
        passed = now - self._probed_at
        # A clock that stepped back must not delay the probe.
        return timedelta(0) if passed >= pause or passed < timedelta(0) else pause - passed

    def prefers_retries(self, others: Sized) -> bool:
        """Return whether the next probe should be a retry rather than one of `others`; they take turns."""
        return not len(others) or self._probes % 2 == 1

    def probing(self, now: datetime) -> None:
        """Note that a probe is sent."""
        self._probed_at = now
        self._probes += 1
