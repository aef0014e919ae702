"""The counts behind a day's figures, which are summed over parts of the day."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# The last place of these also counts every larger value.
MOST_CHECKS = 20
MOST_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class DayCounts:
    """`outcomes`: transactions by COUNTED (spark/transforms/outcomes.py). `settled`: live receipts by subscription,
    outcome and attempts. `latencies`: live deliveries by subscription and bucket of FROM_MS. `checks`: transactions by
    number of checks, from 1. `topics`: messages in the outbox, `groups`: transactions, by name; without Halfnote's own.
    """

    outcomes: Counter[tuple[int, str, int | None, int | None]] = field(default_factory=Counter)
    settled: Counter[tuple[int, str, int]] = field(default_factory=Counter)
    latencies: Counter[tuple[int, int]] = field(default_factory=Counter)
    checks: Counter[int] = field(default_factory=Counter)
    topics: Counter[str] = field(default_factory=Counter)
    groups: Counter[str] = field(default_factory=Counter)


def total(parts: Sequence[DayCounts]) -> DayCounts:
    """Return the sums of the parts."""
    summed = DayCounts()
    for part in parts:
        summed.outcomes.update(part.outcomes)
        summed.settled.update(part.settled)
        summed.latencies.update(part.latencies)
        summed.checks.update(part.checks)
        summed.topics.update(part.topics)
        summed.groups.update(part.groups)
    return summed
