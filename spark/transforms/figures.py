"""What a day's plots are drawn from: counts by time of day and by size, small enough for one row of reconciliation_day.

Plots need no more than this, so the joins here are narrow: a hash of the id stands for the id. Two ids in 30 million
share one with a probability of 1 in 40,000, and would then be counted as one.
"""

from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial, reduce
from typing import Any

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from spark.at_once import at_once
from spark.frames import Frames

QUARTERS = 96
# Lower bounds of the buckets of all durations: 1, 2, 5, 10 ms … 500,000 s. The first also takes what is shorter, the
# last what is longer.
FROM_MS = tuple(step * 10**power for power in range(9) for step in (1, 2, 5))
OUTCOMES = ("committed", "rolled_back", "parked", "undecided")
SOURCES = ("producer", "check", "policy", "operator")  # by op.source
# The last place of these takes all that is more.
MOST_CHECKS = 20
MOST_ATTEMPTS = 16
# The busiest by name, the others summed.
SUBSCRIPTIONS = 50
# Of how many deliveries a latency is looked up in the outbox; of more, one in so many messages stands for the others.
LATENCIES = 500_000
# What is known of a transaction, in one number: the quarter, that it was born, verdict, source, that it is parked.
_BORN, _VERDICT, _SOURCE, _PARKED = 1 << 7, 1 << 8, 1 << 10, 1 << 12


def figures(f: Frames) -> dict[str, Any]:
    """Return the day's figures, as JSON has them.

    `outcomes`: transactions by the quarter of an hour they were born in (96 counts, times outside the day in the first
    or last) for each of OUTCOMES. `from_s`: the lower bounds, in seconds, of the buckets of `verdict` (time from born
    to decided, by source) and of each subscription's `latency`. `checks`: transactions by number of checks, 0 to
    MOST_CHECKS. `subscriptions`: the SUBSCRIPTIONS busiest, see `_subscriptions`; `others` sums the rest, None if there
    are none. `latency_of_one_in`: 1, or which part of the messages latencies were looked up for.
    """
    parts: list[Callable[[], Any]] = [_transactions(f).collect, partial(_subscriptions, f), partial(_checks, f)]
    found, (every, one_in), checks = at_once(parts)
    return _told(found, every, one_in, checks)


def no_figures() -> dict[str, Any]:
    """Return the figures of a day without rows, which Spark need not be asked for."""
    return _told([], [], 1, [0] * (MOST_CHECKS + 1))


def _told(found: list[Row], every: list[dict[str, Any]], one_in: int, checks: list[int]) -> dict[str, Any]:
    outcomes = {name: [0] * QUARTERS for name in OUTCOMES}
    verdict = {name: [0] * len(FROM_MS) for name in SOURCES}
    for row in found:
        outcomes[row.outcome][row.quarter] += row["count"]
        if row.bucket is not None:
            verdict[SOURCES[row.source]][row.bucket] += row["count"]
    checks[0] = max(0, sum(row["count"] for row in found) - sum(checks))
    return {
        "outcomes": outcomes,
        "from_s": [ms / 1000 for ms in FROM_MS],
        "verdict": verdict,
        "checks": checks,
        "subscriptions": every[:SUBSCRIPTIONS],
        "others": _sum(every[SUBSCRIPTIONS:]),
        "latency_of_one_in": one_in,
    }


def bucket_of(seconds: float) -> int:
    """Return the place in FROM_MS that a duration belongs to; `_bucket` is the same in Spark."""
    return max(0, bisect_right(FROM_MS, seconds * 1000) - 1)


def _transactions(f: Frames) -> DataFrame:
    """Count transactions by quarter of an hour, outcome, and (if decided) source and bucket of the time it took."""
    midnight = F.lit(int(datetime(f.day.year, f.day.month, f.day.day, tzinfo=UTC).timestamp()) * 1_000_000)
    quarter = F.floor((F.unix_micros("born_at") - midnight) / F.lit(900_000_000))
    quarter = F.least(F.greatest(quarter, F.lit(0)), F.lit(QUARTERS - 1)).cast("long")
    known = (
        _by_id(f.half.where("position = 0"), -F.unix_micros("born_at"), quarter + _BORN),
        _by_id(f.op, F.unix_micros("decided_at"), F.expr(f"verdict * {_VERDICT}L + source * {_SOURCE}L")),
        _by_id(f.check_back.where("state = 2"), F.lit(0), F.lit(_PARKED)),
    )
    # Each is there once, so nothing is gained by adding up before they come together; a join would sort both sides.
    together = reduce(DataFrame.unionByName, known).repartition("id").groupBy("id")
    summed = together.agg(F.sum("micros").alias("micros"), F.bit_or("code").alias("code"))
    verdict = F.expr(f"code div {_VERDICT} % 4")
    outcome = (
        F.when(verdict == 1, "committed")
        .when(verdict == 2, "rolled_back")
        .when(F.expr(f"code >= {_PARKED}"), "parked")
        .otherwise("undecided")
    )
    return (
        summed.where(f"code div {_BORN} % 2 = 1")
        .select(
            F.expr(f"code % {_BORN}").alias("quarter"),
            outcome.alias("outcome"),
            F.when(verdict > 0, F.expr(f"code div {_SOURCE} % 4")).alias("source"),
            _bucket(F.when(verdict > 0, F.col("micros"))).alias("bucket"),
        )
        .groupBy("quarter", "outcome", "source", "bucket")
        .count()
    )


def _by_id(frame: DataFrame, micros: Column, code: Column) -> DataFrame:
    id_ = F.xxhash64("transaction_id").alias("id")
    return frame.select(id_, micros.cast("long").alias("micros"), code.cast("long").alias("code"))


def _bucket(micros: Column) -> Column:
    """Return the place in FROM_MS of a duration in microseconds; null stays null. Powers of ten are exact here."""
    at_least = F.greatest(micros, F.lit(1000))
    power = F.floor(F.log10(at_least))
    first = at_least / F.pow(F.lit(10.0), power)
    step = F.when(first >= 5, 2).when(first >= 2, 1).otherwise(0)
    place = F.least((power - 3) * 3 + step, F.lit(len(FROM_MS) - 1))
    # greatest() and least() pass over nulls.
    return F.when(micros.isNotNull(), place.cast("int"))


def _checks(f: Frames) -> list[int]:
    """Return how many transactions were checked 1, 2, … MOST_CHECKS or more times, after a 0."""
    checks = F.least(F.col("count"), F.lit(MOST_CHECKS)).alias("checks")
    by_number = (
        f.attempt.where("kind = 'check'").groupBy("transaction_id").count().select(checks).groupBy("checks").count()
    )
    counts = [0] * (MOST_CHECKS + 1)
    for row in by_number.collect():
        counts[row.checks] = row["count"]
    return counts


def _subscriptions(f: Frames) -> tuple[list[dict[str, Any]], int]:
    """Return the subscriptions with anything on that day, the busiest first, and which part latencies are known of.

    Each: `subscription_id`, `name` (None: its row is gone), `delivered`, `dropped` (receipts), `waiting` (retries and
    held back), `dead`, `attempts` (deliveries by tries used, 1 to MOST_ATTEMPTS), `latency` (deliveries by the time
    from commit, or from when they were due, to receipt; buckets of FROM_MS). Live deliveries only, no replays.
    """
    found: dict[int, dict[str, Any]] = {}
    for row in _settled(f).collect():
        one = found.setdefault(row.subscription_id, _nothing(row.subscription_id))
        one[row.outcome] += row["count"]
        if row.outcome == "delivered":
            one["attempts"][row.attempts - 1] += row["count"]
    for name, rows in (("waiting", f.delivery_retry), ("dead", f.dead_letter)):
        for row in rows.where("replay = 0").groupBy("subscription_id").count().collect():
            found.setdefault(row.subscription_id, _nothing(row.subscription_id))[name] = row["count"]
    one_in = max(1, -(-sum(one["delivered"] for one in found.values()) // LATENCIES))
    for row in _latencies(f, one_in).collect():
        found[row.subscription_id]["latency"][row.bucket] = row["count"]
    for row in f.subscription.select("subscription_id", "name").collect():
        if row.subscription_id in found:
            found[row.subscription_id]["name"] = row["name"]
    return sorted(found.values(), key=_busiest_first), one_in


def _settled(f: Frames) -> DataFrame:
    """Count the live receipts by subscription, outcome and attempts."""
    attempts = F.least(F.greatest("attempts", F.lit(1)), F.lit(MOST_ATTEMPTS)).alias("attempts")
    return (
        f.receipt.where("replay = 0 and outcome in ('delivered', 'dropped')")
        .groupBy("subscription_id", "outcome", attempts)
        .count()
    )


def _latencies(f: Frames, one_in: int) -> DataFrame:
    """Count live deliveries by subscription and bucket of latency, for one in `one_in` messages."""
    # By a hash, because offsets count up: whatever comes round regularly would be all in or all out.
    of_those = F.pmod(F.xxhash64("offset"), F.lit(one_in)) == 0
    message = F.xxhash64("transaction_id", "position").alias("id")
    sent = f.outbox.where(of_those).select(message, F.unix_micros(F.coalesce("due_at", "committed_at")).alias("sent"))
    settled = f.receipt.where("replay = 0 and outcome = 'delivered'").where(of_those)
    settled = settled.select(message, "subscription_id", F.unix_micros("settled_at").alias("settled"))
    return (
        settled.join(sent, "id")
        .groupBy("subscription_id", _bucket(F.col("settled") - F.col("sent")).alias("bucket"))
        .count()
    )


def _nothing(subscription_id: int | None) -> dict[str, Any]:
    counts = {"delivered": 0, "dropped": 0, "waiting": 0, "dead": 0}
    lists = {"attempts": [0] * MOST_ATTEMPTS, "latency": [0] * len(FROM_MS)}
    return {"subscription_id": subscription_id, "name": None, **counts, **lists}


def _busiest_first(one: dict[str, Any]) -> tuple[int, int]:
    return -(one["delivered"] + one["dropped"] + one["waiting"] + one["dead"]), one["subscription_id"]


def _sum(rest: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the rest amounts to, shaped as one of them, with `subscriptions` the number of them."""
    if not rest:
        return None
    total = _nothing(None) | {"subscriptions": len(rest)}
    for name in ("delivered", "dropped", "waiting", "dead"):
        total[name] = sum(one[name] for one in rest)
    for name in ("attempts", "latency"):
        total[name] = [sum(places) for places in zip(*(one[name] for one in rest), strict=True)]
    return total
