"""PURE: measure how many messages a second a stream delivers and fails to deliver."""

from datetime import datetime

# The weight of one second: after five seconds, two thirds of a change show.
SMOOTHING = 0.2
LEAST_SHOWN = 0.01


class Rates:
    """`delivered` and `failed` count messages; `measure` turns the counts into rates."""

    def __init__(self) -> None:
        self.delivered = self.failed = 0
        self._rates = (0.0, 0.0)
        self._measured_at: datetime | None = None

    def measure(self, now: datetime) -> tuple[float, float] | None:
        """Return messages a second, delivered and failed, smoothed; None while both stay at zero."""
        counts = (self.delivered, self.failed)
        seconds = (now - self._measured_at).total_seconds() if self._measured_at else 0.0
        self._measured_at = now
        if seconds <= 0:
            return None
        self.delivered = self.failed = 0
        before = self._rates
        weight = min(1.0, SMOOTHING * seconds)
        rates = [old + (count / seconds - old) * weight for old, count in zip(before, counts, strict=True)]
        self._rates = tuple(rate if rate >= LEAST_SHOWN else 0.0 for rate in rates)  # type: ignore[assignment]
        return self._rates if any(self._rates) or any(before) else None
