"""PURE: decide when upkeep tries a day again that it failed to read or to remove."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

# The waits after the first failure and the next ones, in turns of upkeep; the last one is for all that follow.
REST_TURNS = (1, 2, 4, 8, 10)
# A day is due half a turn before its turn begins, which may be a little early.
EARLY_TURNS = 0.5


@dataclass(frozen=True, slots=True)
class DayFailure:
    """The last of a day's failures in a row: their number, when the first one began, and when the day is tried again.

    `began`: the last try. `held`: the causes that the day's row has meanwhile.
    """

    number: int
    since: datetime
    began: datetime
    retry_at: datetime
    held: tuple[str, ...]

    def rests(self, now: datetime, held: Sequence[str]) -> bool:
        """Return whether the day is left alone now: not after a person changed its causes or the clock went back."""
        return self.began <= now < self.retry_at and self.held == tuple(held)


def failed(
    before: DayFailure | None, began: datetime, took: timedelta, turn: timedelta, held: Sequence[str]
) -> DayFailure:
    """Return what follows from a failure: the day rests at least as long as its last try took."""
    number = 1 if before is None else before.number + 1
    rest = max(took, turn * (REST_TURNS[min(number, len(REST_TURNS)) - 1] - EARLY_TURNS))
    return DayFailure(number, began if before is None else before.since, began, began + took + rest, tuple(held))
