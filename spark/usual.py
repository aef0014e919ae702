"""What is usual for a day, by the counts of the days before. Pure functions.

It is the median of the same weekday over four weeks, so a quiet weekend is usual. What is normal must not be reported:
names with few messages, new names, and names whose counts vary a lot are left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from statistics import median
from typing import TypeAlias

# Counts by name, by sort: topic, group or subscription.
Volumes: TypeAlias = Mapping[str, Mapping[str, int]]
# The share of the usual count below which a count is a finding.
SHARE = 0.2
WINDOW = timedelta(days=28)
# Without this many days of the same weekday, all days of the window count, if there are this many.
SAME_WEEKDAYS = 3
KNOWN_DAYS = 14
# A name that usually has fewer is not judged: chance alone makes such counts vary.
LEAST_USUAL = 100
# A count within so many median absolute deviations is usual: three standard deviations of a normal distribution.
DEVIATIONS = 3 * 1.4826
# A name without any message for so many known days was given up on purpose.
GONE_DAYS = 7


@dataclass(frozen=True, slots=True)
class Usual:
    """The usual count, its median absolute deviation, and from how many days both are."""

    count: float
    deviation: float
    days: int


@dataclass(frozen=True)
class Expected:
    """What is expected of a day: the counts of earlier days, and the shares.

    `share`: of every name; `shares`: of single names, as `topic:orders`; 0 is never a finding. `removed`: names that
    were taken out of use, in the same form.
    """

    history: Mapping[date, Volumes] = field(default_factory=dict)
    share: float = SHARE
    shares: Mapping[str, float] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()


def usual(day: date, counts: Mapping[date, int]) -> Usual | None:
    """Return what is usual for a day by the counts of earlier days; None: there are too few of them.

    Of fewer than SAME_WEEKDAYS same weekdays the median is only used where it is lower than that of all days.
    """
    known = {one: count for one, count in counts.items() if timedelta(0) < day - one <= WINDOW}
    same = [count for one, count in known.items() if one.weekday() == day.weekday()]
    if len(same) >= SAME_WEEKDAYS:
        return _usual(same)
    if not same or len(known) < KNOWN_DAYS:
        return None
    of_all, of_same = _usual(list(known.values())), _usual(same)
    return Usual(min(of_all.count, of_same.count), max(of_all.deviation, of_same.deviation), len(known))


def is_fewer(count: int, than: Usual, share: float) -> bool:
    """Return whether a count is far below what is usual."""
    lowest = min(share * than.count, than.count - DEVIATIONS * than.deviation)
    return than.count >= LEAST_USUAL and count < lowest


def is_gone(day: date, counts: Mapping[date, int], count: int) -> bool:
    """Return whether a name has nothing on a day and had nothing on the last GONE_DAYS known days."""
    last = [counts[one] for one in sorted(one for one in counts if one < day)[-GONE_DAYS:]]
    return count == 0 and not any(last)


def _usual(counts: list[int]) -> Usual:
    middle = median(counts)
    return Usual(middle, median(abs(count - middle) for count in counts), len(counts))
