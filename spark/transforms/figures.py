"""The figures behind a day's plots: counts by time of day and by size, small enough for a row of reconciliation_day.

Plots need no more than this, so the joins here are narrow: a hash of the id stands for the id. Two ids in 30 million
share one with a probability of 1 in 40,000, and would then be counted as one.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, NamedTuple

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.engine.parallel import at_once
from spark.frames import Frames
from spark.transforms import volumes
from spark.transforms.day_counts import MOST_ATTEMPTS, MOST_CHECKS, DayCounts
from spark.transforms.outcomes import COUNTED, FROM_MS, QUARTERS, bucket, outcomes
from spark.usual import Volumes

OUTCOMES = ("committed", "rolled_back", "parked", "undecided")
SOURCES = ("producer", "check", "policy", "operator")  # by op.source
# The busiest subscriptions are listed by name; the others are summed.
SUBSCRIPTIONS = 50
# Up to this many deliveries, each latency is looked up in the outbox; above it, a sample of messages is used.
LATENCIES = 500_000


class CountedOutcome(NamedTuple):
    """How many transactions have the values COUNTED."""

    quarter: int
    outcome: str
    source: int | None
    bucket: int | None
    times: int


class CountedReceipts(NamedTuple):
    """How many live deliveries of a subscription were settled with an outcome after so many attempts."""

    subscription_id: int
    outcome: str
    attempts: int
    times: int


def figures(f: Frames, counted: DataFrame | None = None) -> dict[str, Any]:
    """Return the day's figures, as JSON has them. `counted`: its `outcomes`, where they are known already.

    `outcomes`: transactions by the quarter of an hour they were born in (96 counts, times outside the day in the first
    or last) for each of OUTCOMES. `from_s`: the lower bounds, in seconds, of the buckets of `verdict` (time from born
    to decided, by source) and of each subscription's `latency`. `checks`: transactions by number of checks, 0 to
    MOST_CHECKS. `subscriptions`: the SUBSCRIPTIONS busiest, see `_subscriptions`; `others` sums the rest, None if there
    are none. `latency_of_one_in`: 1, or which part of the messages latencies were looked up for.
    """
    return figures_and_volumes(f, counted)[0]


def figures_and_volumes(f: Frames, counted: DataFrame | None = None) -> tuple[dict[str, Any], Volumes]:
    """Return the day's figures, and its counts by topic, group and subscription (spark/transforms/volumes.py)."""
    known = outcomes(f) if counted is None else counted
    parts: list[Callable[[], Any]] = [
        lambda: [CountedOutcome(*row) for row in known.select(*COUNTED, F.col("count").alias("times")).collect()],
        partial(_subscriptions, f),
        partial(_checks, f),
        partial(volumes.of_tables, f),
    ]
    found, (every, one_in), checks, of_tables = at_once(parts)
    of_day = {**of_tables, volumes.SUBSCRIPTION: volumes.of_subscriptions(every)}
    return _day_figures(found, every, one_in, checks), of_day


def figures_of_counts(f: Frames, counts: DayCounts) -> tuple[dict[str, Any], Volumes]:
    """Return what `figures_and_volumes` does, from the counts of a search; each latency is known."""
    known = [CountedOutcome(*counted, count) for counted, count in counts.outcomes.items()]
    settled = [CountedReceipts(*counted, count) for counted, count in counts.settled.items()]
    every = _waiting_and_dead(f, settled)
    for (subscription_id, place), count in counts.latencies.items():
        every[subscription_id]["latency"][place] = count
    checks = [counts.checks[number] for number in range(MOST_CHECKS + 1)]
    listed = _named(f, every)
    of_day = {
        volumes.TOPIC: volumes.cut(counts.topics),
        volumes.GROUP: volumes.cut(counts.groups),
        volumes.SUBSCRIPTION: volumes.of_subscriptions(listed),
    }
    return _day_figures(known, listed, 1, checks), of_day


def no_figures() -> dict[str, Any]:
    """Return the figures of a day without rows, without a Spark query."""
    return _day_figures([], [], 1, [0] * (MOST_CHECKS + 1))


def _day_figures(
    found: list[CountedOutcome], every: list[dict[str, Any]], one_in: int, checks: list[int]
) -> dict[str, Any]:
    by_quarter = {name: [0] * QUARTERS for name in OUTCOMES}
    verdict = {name: [0] * len(FROM_MS) for name in SOURCES}
    for one in found:
        by_quarter[one.outcome][one.quarter] += one.times
        if one.bucket is not None and one.source is not None:
            verdict[SOURCES[one.source]][one.bucket] += one.times
    checks[0] = max(0, sum(one.times for one in found) - sum(checks))
    return {
        "outcomes": by_quarter,
        "from_s": [ms / 1000 for ms in FROM_MS],
        "verdict": verdict,
        "checks": checks,
        "subscriptions": every[:SUBSCRIPTIONS],
        "others": _sum(every[SUBSCRIPTIONS:]),
        "latency_of_one_in": one_in,
    }


def bucket_of(seconds: float) -> int:
    """Return the place in FROM_MS that a duration belongs to; `outcomes.bucket` is the same in Spark."""
    return max(0, bisect_right(FROM_MS, seconds * 1000) - 1)


def _checks(f: Frames) -> list[int]:
    """Return how many transactions were checked 1, 2, … MOST_CHECKS or more times, after a 0.

    A check that `/end` answered has two attempts, so its number counts.
    """
    checks = F.least(F.max("number"), F.lit(MOST_CHECKS)).alias("checks")
    by_number = f.attempt.where("kind = 'check'").groupBy("transaction_id").agg(checks).groupBy("checks").count()
    counts = [0] * (MOST_CHECKS + 1)
    for row in by_number.collect():
        counts[row.checks] = row["count"]
    return counts


def _subscriptions(f: Frames) -> tuple[list[dict[str, Any]], int]:
    """Return the subscriptions with any row on that day, the busiest first, and the share with known latencies.

    Each: `subscription_id`, `name` (None: its row is gone), `delivered`, `dropped` (receipts), `waiting` (retries and
    held back), `dead`, `attempts` (deliveries by tries used, 1 to MOST_ATTEMPTS), `latency` (deliveries by the time
    from commit, or from when they were due, to receipt; buckets of FROM_MS). Live deliveries only, no replays.
    """
    settled = _settled(f).select("subscription_id", "outcome", "attempts", F.col("count").alias("times")).collect()
    found = _waiting_and_dead(f, [CountedReceipts(*row) for row in settled])
    one_in = max(1, -(-sum(one["delivered"] for one in found.values()) // LATENCIES))
    for row in _latencies(f, one_in).collect():
        found[row.subscription_id]["latency"][row.bucket] = row["count"]
    return _named(f, found), one_in


def _waiting_and_dead(f: Frames, settled: Iterable[CountedReceipts]) -> dict[int, dict[str, Any]]:
    """Return the subscriptions, without latencies and names, from their settled deliveries and the small tables."""
    found: dict[int, dict[str, Any]] = {}
    for one in settled:
        counts = found.setdefault(one.subscription_id, _nothing(one.subscription_id))
        counts[one.outcome] += one.times
        if one.outcome == "delivered":
            counts["attempts"][one.attempts - 1] += one.times
    for name, table in (("waiting", "delivery_retry"), ("dead", "dead_letter")):
        if f.rows.get(table) != 0:
            for row in getattr(f, table).where("replay = 0").groupBy("subscription_id").count().collect():
                found.setdefault(row.subscription_id, _nothing(row.subscription_id))[name] = row["count"]
    return found


def _named(f: Frames, found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    for subscription_id, name in names_of(f, found.keys()).items():
        found[subscription_id]["name"] = name
    return sorted(found.values(), key=_busiest_first)


def names_of(f: Frames, wanted: Set[int]) -> dict[int, str]:
    """Return the names of these subscriptions, by number: the last name of a deleted one; unknown ones are missing."""
    current = f.subscription.select("subscription_id", "name").collect()
    names = {row.subscription_id: row["name"] for row in current}
    if wanted - names.keys():
        versions = f.subscription_version.select("subscription_id", "name", "version_id").collect()
        last = {row.subscription_id: row["name"] for row in sorted(versions, key=lambda row: row.version_id)}
        names = last | names
    return {subscription_id: names[subscription_id] for subscription_id in wanted & names.keys()}


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
    # Sample by a hash: offsets count up, so a regular pattern would be all in or all out.
    of_those = F.pmod(F.xxhash64("offset"), F.lit(one_in)) == 0
    message = F.xxhash64("transaction_id", "position").alias("id")
    sent = f.outbox.where(of_those).select(message, F.unix_micros(F.coalesce("due_at", "committed_at")).alias("sent"))
    settled = f.receipt.where("replay = 0 and outcome = 'delivered'").where(of_those)
    settled = settled.select(message, "subscription_id", F.unix_micros("settled_at").alias("settled"))
    return (
        settled.join(sent, "id")
        .groupBy("subscription_id", bucket(F.col("settled") - F.col("sent")).alias("bucket"))
        .count()
    )


def _nothing(subscription_id: int | None) -> dict[str, Any]:
    counts = {"delivered": 0, "dropped": 0, "waiting": 0, "dead": 0}
    lists = {"attempts": [0] * MOST_ATTEMPTS, "latency": [0] * len(FROM_MS)}
    return {"subscription_id": subscription_id, "name": None, **counts, **lists}


def _busiest_first(one: dict[str, Any]) -> tuple[int, int]:
    return -(one["delivered"] + one["dropped"] + one["waiting"] + one["dead"]), one["subscription_id"]


def _sum(rest: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the sum of the rest in the shape of one subscription, with `subscriptions` as their number."""
    if not rest:
        return None
    total = _nothing(None) | {"subscriptions": len(rest)}
    for name in ("delivered", "dropped", "waiting", "dead"):
        total[name] = sum(one[name] for one in rest)
    for name in ("attempts", "latency"):
        total[name] = [sum(places) for places in zip(*(one[name] for one in rest), strict=True)]
    return total
