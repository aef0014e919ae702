"""The rule about absence: a topic, group or subscription that has far less on a day than it usually has.

spark/usual.py says what is usual.
"""

from collections.abc import Mapping
from datetime import UTC, date
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.finding import of_rows
from spark.transforms.joined import Joined
from spark.transforms.subscriptions import subscriptions
from spark.transforms.volumes import GROUP, SUBSCRIPTION, TOPIC, beyond
from spark.usual import WINDOW, Expected, Usual, Volumes, is_fewer, is_gone, usual

KIND = "fewer_than_usual"


def absent(f: Frames, volumes: Volumes, expected: Expected) -> list[dict[str, Any]] | None:
    """Return the names that have far less than usual, as rows of findings; None for a day that is not over."""
    if f.seen_at.astimezone(UTC).date() <= f.day:
        return None
    found = [one for sort in (TOPIC, GROUP, SUBSCRIPTION) for one in _of_sort(f.day, sort, volumes, expected)]
    if not found:
        return []
    ids = _judged(f) if any(one["sort"] == SUBSCRIPTION for one in found) else {}
    return [
        _finding(f.day, one, ids.get(one["name"]) if one["sort"] == SUBSCRIPTION else None)
        for one in found
        if one["sort"] != SUBSCRIPTION or one["name"] in ids
    ]


def fewer_than_usual(j: Joined) -> DataFrame:
    """A topic, group or subscription has far fewer messages than on the same weekday of the weeks before."""
    return frame_of(j.whole)


def frame_of(f: Frames) -> DataFrame:
    """Return the findings of `absent` as a frame."""
    spark: SparkSession = f.op.sparkSession
    return of_rows(spark, f.absent or [])


def _of_sort(day: date, sort: str, volumes: Volumes, expected: Expected) -> list[dict[str, Any]]:
    history = {one: counts[sort] for one, counts in expected.history.items() if sort in counts and one < day}
    names = sorted({name for one, counts in history.items() if day - one <= WINDOW for name in counts})
    today = volumes.get(sort, {})
    missing = {one: beyond(counts) for one, counts in (history | {day: today}).items()}
    found = []
    for name in names:
        subject = f"{sort}:{name}"
        share = expected.shares.get(subject, expected.share)
        counts = {one: here.get(name, missing[one]) for one, here in history.items()}
        count, than = today.get(name, missing[day]), usual(day, counts)
        if than is None or subject in expected.removed or not is_fewer(count, than, share):
            continue
        if not is_gone(day, counts, count):
            found.append({"sort": sort, "name": name, "count": count, "usual": than, "share": share})
    return found


def _judged(f: Frames) -> dict[str, int]:
    """Return the ids of the subscriptions by name that were active, with the same topics and filters, all the time."""
    since = F.lit(f.day) - F.make_interval(days=F.lit(WINDOW.days))
    steady = subscriptions(f.subscription_version).where("state = 'active' and deleted_at is null")
    steady = steady.where((F.col("matches_since") < since) & (F.to_date("state_since") < F.lit(f.day)))
    return {row["name"]: row["subscription_id"] for row in steady.select("name", "subscription_id").collect()}


def _finding(day: date, one: Mapping[str, Any], subscription_id: int | None) -> dict[str, Any]:
    than: Usual = one["usual"]
    detail = {"count": one["count"], "usual": than.count, "days": than.days, "share": one["share"]}
    return {
        "day": str(day),
        "kind": KIND,
        "subject": f"{one['sort']}:{one['name']}",
        "subscription_id": subscription_id,
        "producer_group": one["name"] if one["sort"] == GROUP else None,
        "detail": detail | {"messages": round(than.count - one["count"])},
    }
