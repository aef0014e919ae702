"""Generate deliveries: messages by subscription, times, attempts, dead letters, and people's actions on them."""

from dataclasses import dataclass

import numpy as np

from spark.synthetic.columns import NONE, Bools, Ints
from spark.synthetic.messages import AUDIT, EUROPEAN, Messages
from spark.synthetic.plan import Plan

# Shares of 10,000: delivered at the first attempt, after failures, dead, dead and dropped, dead and redelivered.
FIRST, RETRIED, DEAD, DROPPED, REDELIVERED = range(5)
_LIMITS = np.array([0.9790, 0.9993, 0.9997, 0.9999])
# The pause after each failed attempt.
BACKOFFS_US = np.cumsum([0, 5, 30, 300, 1800]) * 1_000_000
TRIES = len(BACKOFFS_US)
# The share of messages that a replay delivers again.
REPLAYED, REPLAY = 0.001, 1


@dataclass
class Deliveries:
    """Columns of a chunk's deliveries: the message (its place in the chunk) and the subscription (its number).

    `failed`: the number of failed attempts before. Faults change two columns: `kept` False leaves no row, `wrong` gives
    the receipt a wrong digest.
    """

    of: Ints
    to: Ints
    outcome: Ints
    replay: Ints
    failed: Ints
    first_at: Ints
    duration_ms: Ints
    kept: Bools
    wrong: Bools

    @property
    def over(self) -> Ints:
        """The times at which the last attempts began."""
        last: Ints = self.first_at + BACKOFFS_US[np.minimum(self.failed, TRIES - 1)]
        return last

    @property
    def received(self) -> Bools:
        """Whether each delivery has a receipt."""
        found: Bools = self.kept & (self.outcome != DEAD)
        return found


def generate_deliveries(plan: Plan, made: Messages, rng: np.random.Generator) -> Deliveries:
    """Return the deliveries of a chunk's messages, replays last."""
    of, to = matches(plan, made)
    outcome = np.searchsorted(_LIMITS, rng.random(len(of)), side="right").astype(np.int64)
    again = np.flatnonzero((rng.random(len(of)) < REPLAYED) & (outcome == FIRST))
    of, to, outcome = (np.concatenate([column, column[again]]) for column in (of, to, outcome))
    count, live = len(of), len(of) - len(again)
    start = np.maximum(made.committed[of], made.due[of])
    first_at = start + (np.clip(np.exp(rng.normal(2.5, 1.0, size=count)), 1, 2_000) * 1000).astype(np.int64)
    first_at[live:] += 600_000_000
    failed = np.where(outcome == RETRIED, rng.integers(1, TRIES, size=count), np.where(outcome == FIRST, 0, TRIES))
    return Deliveries(
        of=of,
        to=to,
        outcome=outcome,
        replay=np.where(np.arange(count) < live, 0, REPLAY),
        failed=failed,
        first_at=first_at,
        duration_ms=np.clip(np.exp(rng.normal(2.0, 0.8, size=count)), 1, 5_000).astype(np.int64),
        kept=np.ones(count, dtype=bool),
        wrong=np.zeros(count, dtype=bool),
    )


def matches(plan: Plan, made: Messages) -> tuple[Ints, Ints]:
    """Return the messages' places and the subscriptions' numbers of all deliveries, in order of the outbox."""
    published = made.published & (made.to != NONE)
    places, numbers = [np.flatnonzero(published)], [made.to[published]]
    for subscription in plan.subscriptions():
        if subscription.also is None:
            continue
        by_tag = subscription.number % 4 == 2
        taken = made.tag == AUDIT if by_tag else np.isin(made.headers, EUROPEAN)
        more = np.flatnonzero(published & taken & (made.to == subscription.also))
        places.append(more)
        numbers.append(np.full(len(more), subscription.number))
    of, to = np.concatenate(places), np.concatenate(numbers)
    order = np.argsort(of, kind="stable")
    return of[order], to[order]
