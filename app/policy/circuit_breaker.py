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
# A destination that only asks for pauses counts as down after this long, so that a person learns of it. It is not
# shorter, because some destinations allow a number of messages an hour.
LIMITS_AT_MOST_S = 3600
LIMITS_AT_MOST = timedelta(seconds=LIMITS_AT_MOST_S)
# By how much the clock of the process that stored a pause may be ahead of this one's.
CLOCKS_APART = timedelta(seconds=5)


class Breaker:
    """Closed, it counts failures; open, it allows one probe at a time.

    While it is open only probes are sent, and no failure uses up a try, so an outage makes no dead letter. Every probe
    should be another message, so that a poison message cannot keep it open.

    It is open because the destination counts as down (`opened_at`), or only because the destination limits its rate
    (`limited_since`): it asks for pauses, each until `paused_until`.
    """

    def __init__(
        self,
        opened_at: datetime | None = None,
        because: str | None = None,
        limited_since: datetime | None = None,
        paused_until: datetime | None = None,
    ) -> None:
        self.opened_at, self.because = opened_at, because
        self.limited_since, self.paused_until = limited_since, paused_until
        self._failed: set[Hashable] = set()
        self._asked: set[Hashable] = set()
        self._unreachable = 0
        self._probes = 0
        self._probed_at: datetime | None = None
        # `_probed_at` and `_probes` before the last probe.
        self._before_probe: tuple[datetime | None, int] | None = None

    @property
    def open(self) -> bool:
        """Whether only probes may be sent."""
        return self.down or self.limited_since is not None

    @property
    def down(self) -> bool:
        """Whether the destination counts as down."""
        return self.opened_at is not None

    def succeeded(self) -> bool:
        """Note that the destination took a message; return whether this closed the breaker."""
        self._failed.clear()
        self._asked.clear()
        self._unreachable = self._probes = 0
        self._before_probe = None
        closed = self.open
        self.opened_at = self.because = self.limited_since = self.paused_until = None
        return closed

    def failed(self, message: Hashable, error: str, now: datetime, *, unreachable: bool) -> bool:
        """Note a failure that may be the destination's fault; return whether this opened the breaker."""
        if self.down:
            return False
        self._failed.add(message)
        self._unreachable = self._unreachable + 1 if unreachable else 0
        if len(self._failed) >= MESSAGES or self._unreachable >= UNREACHABLE:
            return self._open(now, self._cause(error))
        return self._limit(error, now)

    def asked_for_pause(self, message: Hashable, error: str, retry_after_s: float, now: datetime) -> bool:
        """Note a call whose answer asked for a pause, by one of its messages; return whether this opened the breaker.

        Only different messages in a row open it, because such an answer may be about its message alone.
        """
        self._unreachable = 0
        self.paused_until = now + min(LONGEST_RETRY_AFTER, timedelta(seconds=retry_after_s))
        if self.down:
            return False
        self._asked.add(message)
        return self._limit(error, now)

    def _limit(self, error: str, now: datetime) -> bool:
        if self.limited_since is None:
            if len(self._failed | self._asked) < MESSAGES:
                return False
            self.limited_since = self._probed_at = now
            return True
        self._asked.clear()
        if now - self.limited_since < LIMITS_AT_MOST:
            return False
        return self._open(now, f"no message was taken since {self.limited_since:%H:%M} UTC: {error}")

    def _open(self, now: datetime, because: str) -> bool:
        """Count the destination as down; return whether only this opened the breaker."""
        opens = not self.open
        self.opened_at, self.because, self.limited_since = now, because, None
        if opens:
            self._probed_at, self.paused_until = now, None
        self._failed.clear()
        self._asked.clear()
        return opens

    def _cause(self, error: str) -> str:
        if self._unreachable < UNREACHABLE:
            return f"{len(self._failed)} different messages failed in a row: {error}"
        # Most such errors say it themselves.
        return error if error.startswith("no connection") else f"no connection: {error}"

    def wait(self, now: datetime) -> timedelta:
        """Return the time until an open breaker's next probe may be sent; zero: now."""
        # A clock that stepped back must not delay the probe.
        none = left = timedelta(0)
        if self._probed_at is not None and now >= self._probed_at:
            pause = min(LONGEST_PROBE, FIRST_PROBE * 2 ** min(self._probes, 10))
            left = self._probed_at + pause - now
        if self.paused_until is not None and self.paused_until - now <= LONGEST_RETRY_AFTER + CLOCKS_APART:
            left = max(left, self.paused_until - now)
        return max(none, left)

    def prefers_retries(self, others: Sized) -> bool:
        """Return whether the next probe should be a retry rather than one of `others`; they take turns."""
        return not len(others) or self._probes % 2 == 1

    def probing(self, now: datetime) -> None:
        """Note that a probe is sent."""
        self._before_probe = self._probed_at, self._probes
        self._probed_at = now
        self._probes += 1

    def probed_nothing(self) -> bool:
        """Note that the last probe was not sent after all, so another may go now; return whether there was a probe."""
        if not self.open or self._before_probe is None:
            return False
        (self._probed_at, self._probes), self._before_probe = self._before_probe, None
        return True
