"""How many rows of a day each topic, producer group and subscription has.

`topic`: messages in the outbox; `group`: transactions; `subscription`, by name: live deliveries, settled or not.
Halfnote's own topics are left out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.routes import is_reserved

TOPIC, GROUP, SUBSCRIPTION = "topic", "group", "subscription"
# The most names stored of each sort and day, the busiest first.
MOST_NAMES = 10_000


def of_tables(f: Frames) -> dict[str, dict[str, int]]:
    """Return the counts by topic and by group, from two narrow passes."""
    sent = _busiest(f.outbox.where(~is_reserved("topic")), TOPIC, "topic")
    began = _busiest(f.half.where("position = 0").where(~is_reserved("topic")), GROUP, "producer_group")
    found: dict[str, dict[str, int]] = {TOPIC: {}, GROUP: {}}
    for row in sent.unionByName(began).collect():
        found[row["sort"]][row["name"]] = row["count"]
    return found


def of_subscriptions(subscriptions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counts by the subscriptions' names. `subscriptions`: those of the day's figures, all of them."""
    found = Counter[str]()
    for one in subscriptions:
        if one["name"] is not None:
            found[one["name"]] += one["delivered"] + one["dropped"] + one["waiting"] + one["dead"]
    return cut(found)


def cut(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the MOST_NAMES busiest."""
    busiest = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return dict(busiest[:MOST_NAMES])


def beyond(counts: Mapping[str, int]) -> int:
    """Return what a name that is missing has at most: 0, unless names were cut."""
    return 0 if len(counts) < MOST_NAMES else min(counts.values())


def _busiest(rows: DataFrame, sort: str, name: str) -> DataFrame:
    counts = rows.groupBy(F.col(name).alias("name")).count()
    return counts.orderBy(F.desc("count"), "name").limit(MOST_NAMES).withColumn("sort", F.lit(sort))
