"""Which days a run reconciles, and which of them are over. Pure: values in, decisions out.

A day is provisional until it is final: everything in it decided and settled, and old enough that nothing can come
after. Whatever was missed, a night or a week, is provisional or unknown, so the next run takes it up.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal

# An unanswered check-back is parked after this, and a `Retry-After` postpones a delivery for no longer.
LONGEST_WAIT = timedelta(hours=72)

State = Literal["provisional", "final"]
# Why a day is run: somebody asked for it; no run saw it yet; something in it was undecided or unsettled; it has
# findings that may be over; it is old enough to become final; it was archived since; its rows changed.
Reason = Literal["asked", "new", "open", "findings", "due", "archived", "changed"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last run said of a day: its state, whether anything in it was undecided or unsettled, how many findings
    of it are open, and its signature."""

    state: State
    open: bool
    findings: int
    signature: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A day whose tables are here; `archive`: where its archive is, if it has one."""

    day: date
    archive: str | None
    seen: Seen | None


def aged(day: date, now: datetime, margin_s: float) -> bool:
    """Tell whether a day is so long over that nothing of it can still be on its way."""
    end = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return now - end >= LONGEST_WAIT + timedelta(seconds=margin_s)


def state_after(day: date, now: datetime, margin_s: float, *, undecided: int, unsettled: int) -> State:
    """Return what a day is after a run that saw it at `now` and counted what is still open in it."""
    return "final" if aged(day, now, margin_s) and not undecided and not unsettled else "provisional"


def reason(
    candidate: Candidate, now: datetime, margin_s: float, signature: Callable[[date], Mapping[str, Any]]
) -> Reason | None:
    """Return why a day is run that nobody asked for, or None if it is not. `signature` reads what the day holds now; it
    is called only if nothing else decides."""
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
        return None
    if seen.open:
        return "open"
    if seen.findings:
        return "findings"
    return "due" if aged(candidate.day, now, margin_s) else None


def days_to_run(
    candidates: Iterable[Candidate],
    now: datetime,
    margin_s: float,
    signature: Callable[[date], Mapping[str, Any]],
    asked: Collection[date] = (),
) -> dict[date, Reason]:
    """Return the days to run, oldest first, and why: those that were asked for and no others, or by watermark.

    A day that has not begun at `now` is none. Raises KeyError with the first day that was asked for and is not here.
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
    return {day: why for day, why in found.items() if why is not None}
