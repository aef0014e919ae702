"""Selects the days that a run reconciles, and decides which are final. Pure functions.

A day is provisional until it is final: all of it is decided and settled, and it is so old that no more rows can appear.
After a missed night or week, the missed days are provisional or unknown, so the next run covers them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

# An unanswered check-back is parked after this time, which is also the longest `Retry-After` of a delivery.
LONGEST_WAIT = timedelta(hours=72)

# The most final days that one run reads again because they were touched, oldest first. A replay may cover all days.
MOST_TOUCHED = 7

State = Literal["provisional", "final"]
# The reasons to run a day: the command names it; no run has covered it; some of it was undecided or unsettled; it has
# findings that may be resolved; no run has read it since it ended; it is old enough to become final; it was archived
# since; it was final, and it was touched since (see Candidate); its rows changed.
Reason = Literal["asked", "new", "open", "findings", "over", "due", "archived", "touched", "changed"]


@dataclass(frozen=True, slots=True)
class Seen:
    """The last run's result for a day.

    Its state, whether any of it was undecided or unsettled, the number of its open findings, its signature, and the
    time of the run's snapshot, if the run is still stored.
    """

    state: State
    open: bool
    findings: int
    signature: Mapping[str, Any]
    seen_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A day whose tables are in the database.

    `archive`: the place of its archive, if it has one. `touched`: of a final day, whether since then a replay of its
    messages ended, a redelivery or a drop began, a subscription began before its last message, or an end was refused.
    """

    day: date
    archive: str | None
    seen: Seen | None
    touched: bool = False


def end_of(day: date) -> datetime:
    """Return when a day ends."""
    return datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)


def aged(day: date, now: datetime, margin_s: float) -> bool:
    """Return whether a day ended so long ago that none of its messages can still be in flight."""
    return now - end_of(day) >= LONGEST_WAIT + timedelta(seconds=margin_s)


def state_after(day: date, now: datetime, margin_s: float, *, undecided: int, unsettled: int) -> State:
    """Return a day's state after a run that read it at `now` and counted its open rows."""
    return "final" if aged(day, now, margin_s) and not undecided and not unsettled else "provisional"


def reason(
    candidate: Candidate, now: datetime, margin_s: float, signature: Callable[[date], Mapping[str, Any]]
) -> Reason | None:
    """Return the reason to run a day that no command names, or None.

    `signature` reads the day's present state; it is called only if no other reason applies.
    """
    seen = candidate.seen
    if seen is None:
        return "new"
    plain = _plain_reason(candidate, seen, now, margin_s)
    if plain is not None or seen.state == "final":
        return plain
    return "changed" if signature(candidate.day) != seen.signature else None


def _plain_reason(candidate: Candidate, seen: Seen, now: datetime, margin_s: float) -> Reason | None:
    if candidate.archive is not None and candidate.archive != seen.signature.get("archive"):
        return "archived"
    if seen.state == "final":
        return "touched" if candidate.touched else None
    if seen.open:
        return "open"
    if seen.findings:
        return "findings"
    if aged(candidate.day, now, margin_s):
        return "due"
    # A day with few rows can be the same after its end, and only then is it known that rows are absent.
    read_before_end = seen.seen_at is not None and seen.seen_at < end_of(candidate.day) <= now
    return "over" if read_before_end else None


def days_to_run(
    candidates: Iterable[Candidate],
    now: datetime,
    margin_s: float,
    signature: Callable[[date], Mapping[str, Any]],
    asked: Collection[date] = (),
) -> dict[date, Reason]:
    """Return the days to run, oldest first, with the reasons: only the requested days, or else by watermark.

    At most MOST_TOUCHED of them are run only because they were touched; a later run takes the others. A day that has
    not begun at `now` is left out. Raises KeyError with the first requested day that is not stored.
    """
    here = {candidate.day: candidate for candidate in sorted(candidates, key=lambda c: c.day)}
    if asked:
        for day in sorted(asked):
            if day not in here:
                raise KeyError(day)
        return dict.fromkeys(sorted(asked), "asked")
    found = {
        day: reason(candidate, now, margin_s, signature)
        for day, candidate in here.items()
        if day <= now.astimezone(UTC).date()
    }
    later = [day for day, why in found.items() if why == "touched"][MOST_TOUCHED:]
    return {day: why for day, why in found.items() if why is not None and day not in later}


def telling_day(stored: Collection[date], chosen: Collection[date], now: datetime) -> date:
    """Return the day whose proof tells what is of no day: yesterday, which each nightly run reads.

    If it is removed already, by a short retention: the newest day that has ended and that the run reads (`chosen`), or
    else today. `stored`: the days whose tables are in the database.
    """
    today = now.astimezone(UTC).date()
    yesterday = today - timedelta(days=1)
    if yesterday in stored:
        return yesterday
    return max((day for day in chosen if day < today), default=today)
