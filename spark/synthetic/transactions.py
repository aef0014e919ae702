"""Generate transactions: the times of their births and verdicts, and their outcomes."""

from dataclasses import dataclass

import numpy as np

from spark.synthetic.columns import NONE, Bools, Ints, Words, uuid7s
from spark.synthetic.plan import BEGINS_S, ENDS_S, GROUPS, INTERVAL_S, MAX_CHECKS, Plan

# Shares of 10,000 by outcome: source and verdict, with or without checks.
COMMITTED, BY_CHECK, BY_OPERATOR, OWN, ROLLED_BACK, BACK_BY_CHECK, BACK_BY_POLICY, BACK_BY_OPERATOR = range(8)
_SHARES = (8740, 240, 10, 10, 860, 100, 30, 10)
# The op.source of each outcome.
_SOURCES = np.array([0, 1, 3, 2, 0, 1, 2, 3])
_SECOND = 1_000_000
IMMUNITY_US = 6 * _SECOND
INTERVAL_US = INTERVAL_S * _SECOND
# A third of the transactions that policy rolls back have their own policy.
FEW_CHECKS = 3
POLICIES = ('{"max_checks": 3}',)


@dataclass
class Transactions:
    """Columns of a chunk's transactions, in order of their verdicts. Faults change them.

    `checks`: the number of answered checks; `own_policy`: a code in POLICIES or NONE; times are Unix µs.
    """

    ids: Words
    outcome: Ints
    group: Ints
    sizes: Ints
    checks: Ints
    own_policy: Ints
    born: Ints
    decided: Ints
    committed: Ints
    verdict: Ints
    source: Ints
    has_half: Bools
    has_op: Bools

    @property
    def swept(self) -> Bools:
        """Whether each transaction had no verdict at the end of its check immunity."""
        return np.isin(self.outcome, (BY_CHECK, BY_OPERATOR, BACK_BY_CHECK, BACK_BY_POLICY, BACK_BY_OPERATOR))


def generate_transactions(plan: Plan, chunk: int, rng: np.random.Generator) -> Transactions:
    """Return the transactions of a chunk."""
    count = plan.size_of(chunk)
    outcome = rng.permutation(_parts(count, _SHARES))
    sizes = rng.permutation(np.array([1, 2, 3, 5])[_parts(count, (9200, 500, 200, 100))])
    sizes[outcome == OWN] = 1
    group = rng.choice(len(GROUPS), size=count, p=[0.5, 0.2, 0.15, 0.1, 0.05])
    # The service's own group comes after those of the producers.
    group[outcome == OWN] = len(GROUPS)
    few = (outcome == BACK_BY_POLICY) & (rng.random(count) < 1 / 3)
    checks = _checks(outcome, few, rng)
    committed, decided = _verdict_times(plan, chunk, rng)
    born = decided - _latencies(outcome, checks, rng)
    born[outcome == OWN] = decided[outcome == OWN]
    return Transactions(
        # A producer's clock is a little behind.
        ids=uuid7s(rng, (born - rng.integers(0, 5_000, size=count)) // 1000),
        outcome=outcome,
        group=group,
        sizes=sizes,
        checks=checks,
        own_policy=np.where(few, 0, NONE),
        born=born,
        decided=decided,
        committed=committed,
        verdict=np.where(outcome < ROLLED_BACK, 1, 2),
        source=_SOURCES[outcome],
        has_half=np.ones(count, dtype=bool),
        has_op=np.ones(count, dtype=bool),
    )


def _parts(count: int, shares: tuple[int, ...]) -> Ints:
    """Return `count` codes, each with the frequency of its share."""
    places = (np.arange(count) + 0.5) / count * sum(shares)
    return np.searchsorted(np.cumsum(shares), places, side="right").astype(np.int64)


def _checks(outcome: Ints, few: Bools, rng: np.random.Generator) -> Ints:
    checks = np.zeros(len(outcome), dtype=np.int64)
    by_check = np.isin(outcome, (BY_CHECK, BACK_BY_CHECK))
    checks[by_check] = rng.integers(1, 4, size=int(by_check.sum()))
    checks[outcome == BACK_BY_POLICY] = MAX_CHECKS
    checks[few] = FEW_CHECKS
    by_operator = np.isin(outcome, (BY_OPERATOR, BACK_BY_OPERATOR))
    checks[by_operator] = rng.integers(1, 6, size=int(by_operator.sum()))
    return checks


def _verdict_times(plan: Plan, chunk: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return the times at which flushes became visible, and the times of their verdicts.

    Flushes within 10 ms share a time, and times never decrease. The day has as many slots as transactions.
    """
    slot_us = (ENDS_S - BEGINS_S) * _SECOND / plan.transactions
    count = plan.size_of(chunk)
    places = chunk * plan.size_of(0) + np.arange(count) + rng.random(count)
    committed = plan.begins_us + BEGINS_S * _SECOND + (places * slot_us).astype(np.int64)
    committed = committed // 10_000 * 10_000 + 10_000
    return committed, committed - rng.integers(500, 5_000, size=count)


def _latencies(outcome: Ints, checks: Ints, rng: np.random.Generator) -> Ints:
    """Return the time of each transaction from birth to verdict: some milliseconds, or the time of its checks."""
    count = len(outcome)
    alone = np.clip(np.exp(rng.normal(3.5, 1.2, size=count)), 2, 5_000) * 1000
    asked = IMMUNITY_US + (checks - 1) * INTERVAL_US + 80_000
    # Policy and people decide if the last check has no definite answer.
    person = rng.integers(10, 60, size=count) * _SECOND
    by_person = np.isin(outcome, (BY_OPERATOR, BACK_BY_OPERATOR))
    return np.where(checks == 0, alone, asked + np.where(by_person, person, 0)).astype(np.int64)
