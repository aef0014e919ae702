"""Generate attempts: swept and parked transactions, checks, failed deliveries, and refused ends."""

from dataclasses import dataclass

import numpy as np

from spark.synthetic.columns import NONE, Ints
from spark.synthetic.deliveries import BACKOFFS_US, DEAD, TRIES, Deliveries
from spark.synthetic.faults import Planted
from spark.synthetic.messages import Messages
from spark.synthetic.plan import Plan
from spark.synthetic.transactions import BACK_BY_CHECK, BY_CHECK, IMMUNITY_US, INTERVAL_US, Transactions

KINDS = ("swept", "check", "delivery", "refused", "parked")
OUTCOMES = ("swept", "unknown", "commit", "rollback", "failed", "refused", "parked")
PARKED_REASON = "max_checks"
_SWEPT_US = IMMUNITY_US + 50_000
_FIRST_CHECK_US = IMMUNITY_US + 60_000


@dataclass
class Attempts:
    """Columns of a chunk's attempts, with codes of KINDS and OUTCOMES; NONE is null.

    `of` is the transaction's place, `to` the subscription's number.
    """

    of: Ints
    kind: Ints
    at: Ints
    number: Ints
    outcome: Ints
    position: Ints
    to: Ints
    verdict: Ints
    source: Ints
    status: Ints
    duration_ms: Ints


def generate_attempts(
    plan: Plan, made: Transactions, messages: Messages, deliveries: Deliveries, planted: Planted
) -> Attempts:
    """Return the attempts of a chunk, including those that faults add."""
    swept = np.concatenate([np.flatnonzero(made.swept), np.array(planted.parked, dtype=np.int64)])
    parked = np.array(planted.parked, dtype=np.int64)
    refused = np.array(planted.refused, dtype=np.int64)
    parts = [
        _part(swept, kind=0, outcome=0, at=made.born[swept] + _SWEPT_US),
        _checks(made),
        _failures(messages, deliveries),
        _part(refused, kind=3, outcome=5, at=made.decided[refused] + 1_000_000, verdict=2, source=0),
        _part(parked, kind=4, outcome=6, at=made.decided[parked]),
    ]
    return Attempts(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _checks(made: Transactions) -> list[Ints]:
    """Return the checks of each transaction. If a check gave the verdict, it is the last one."""
    of = np.repeat(np.arange(len(made.checks)), made.checks)
    number = np.arange(len(of)) - np.repeat(np.cumsum(made.checks) - made.checks, made.checks) + 1
    verdict = np.full(len(of), NONE)
    last = number == made.checks[of]
    verdict[last & (made.outcome[of] == BY_CHECK)] = 1
    verdict[last & (made.outcome[of] == BACK_BY_CHECK)] = 2
    at = made.born[of] + _FIRST_CHECK_US + (number - 1) * INTERVAL_US
    outcome = np.where(verdict == NONE, 1, verdict + 1)
    return _part(of, kind=1, outcome=outcome, at=at, number=number, verdict=verdict, source=1, status=200, ms=12)


def _failures(messages: Messages, deliveries: Deliveries) -> list[Ints]:
    """Return the failed attempts of each delivery."""
    failed = np.where(deliveries.kept, deliveries.failed, 0)
    delivery = np.repeat(np.arange(len(failed)), failed)
    number = np.arange(len(delivery)) - np.repeat(np.cumsum(failed) - failed, failed) + 1
    message = deliveries.of[delivery]
    at = deliveries.first_at[delivery] + BACKOFFS_US[np.minimum(number - 1, TRIES - 1)]
    return _part(
        messages.of[message],
        kind=2,
        outcome=4,
        at=at,
        number=number,
        position=messages.position[message],
        to=deliveries.to[delivery],
        status=503,
        ms=deliveries.duration_ms[delivery],
    )


def _part(
    of: Ints,
    *,
    kind: int,
    outcome: int | Ints,
    at: Ints,
    number: int | Ints = NONE,
    position: int | Ints = NONE,
    to: int | Ints = NONE,
    verdict: int | Ints = NONE,
    source: int = NONE,
    status: int = NONE,
    ms: int | Ints = NONE,
) -> list[Ints]:
    columns = (kind, at, number, outcome, position, to, verdict, source, status, ms)
    return [of, *(np.broadcast_to(np.asarray(column, dtype=np.int64), of.shape) for column in columns)]


def dead(deliveries: Deliveries) -> Ints:
    """Return the places of deliveries that are dead letters."""
    return np.flatnonzero(deliveries.kept & (deliveries.outcome == DEAD))
