"""PURE: the circuit breaker of a destination: when it counts as down or limits its rate, and when it is probed."""

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
# The longest pause of a destination that limits its rate. It is longer than that of one that is down, because such a
# destination answers, and knows when the next message may come.
LONGEST_PAUSE = timedelta(hours=1)


class Breaker:
    """Closed, it counts failures; open (`opened_at` is set), it allows one probe at a time.

    While it is open only probes are sent, and no failure uses up a try, so an outage makes no dead letter. Every probe
    should be another message, so that a poison message cannot keep it open.

    A destination that asks for pauses answers, so it does not count as down. When it has asked for one with as many
    different messages in a row (`limited`), only probes are sent too, each after the pause, until one is taken.
    """

    def __init__(self, opened_at: datetime | None = None, because: str | None = None) -> None:
        self.opened_at, self.because = opened_at, because
        self._failed: set[Hashable] = set()
        self._asked: set[Hashable] = set()
        self._asked_at: datetime | None = None
        self._pause = timedelta(0)
        self._unreachable = 0
        self._probes = 0
        self._retry_after = timedelta(0)
        self._probed_at: datetime | None = None

    @property
    def open(self) -> bool:
        """Whether the destination counts as down."""
        return self.opened_at is not None

    @property
    def limited(self) -> bool:
        """Whether the destination asked for a pause with so many different messages since it last took one."""
        return len(self._asked) >= MESSAGES

    @property
    def probes_only(self) -> bool:
        """Whether only probes may be sent."""
        return self.open or self.limited

    def succeeded(self) -> bool:
        """Note that the destination took a message; return whether this closed the breaker."""
        self._failed.clear()
        self._asked.clear()
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

    def asked_to_wait(self, message: Hashable, retry_after_s: float, now: datetime) -> bool:
        """Note that the destination asked for a pause; return whether only probes may be sent. It must be closed."""
        self._unreachable = 0
        if not self.limited:
            self._asked.add(message)
        self._asked_at, self._pause = now, min(LONGEST_PAUSE, timedelta(seconds=retry_after_s))
        return self.limited

    def _cause(self, error: str) -> str:
        if self._unreachable < UNREACHABLE:
            return f"{len(self._failed)} different messages failed in a row: {error}"
        # Most such errors say it themselves.
        return error if error.startswith("no connection") else f"no connection: {error}"

    def wait(self, now: datetime) -> timedelta:
        """Return the time until the next probe may be sent, if only probes may; zero: now."""
        asked = timedelta(0) if self.open else _left(self._asked_at, self._pause, now)
        pause = max(self._retry_after, min(LONGEST_PROBE, FIRST_PROBE * 2 ** min(self._probes, 10)))
        return max(asked, _left(self._probed_at, pause, now))

    def prefers_retries(self, others: Sized) -> bool:
        """Return whether the next probe should be a retry rather than one of `others`; they take turns."""
        return not len(others) or self._probes % 2 == 1

    def probing(self, now: datetime) -> None:
        """Note that a probe is sent."""
        self._probed_at = now
        self._probes += 1


def _left(since: datetime | None, pause: timedelta, now: datetime) -> timedelta:
    """Return what is left of a pause. A clock that stepped back must not make it longer."""
    if since is None or not timedelta(0) <= now - since < pause:
        return timedelta(0)
    return since + pause - now
