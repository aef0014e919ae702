"""Late deliveries: what a working subscription has not passed although the SLA is over.

A subscription that is behind has many of them, so they are counted by subscription. On most days there are none.
"""

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.schemas import LATE
from spark.transforms.finding import message_id
from spark.transforms.joined import DELIVERY, MESSAGE
from spark.transforms.routes import before, due_from, headers_taken, routes, tag_taken, takers

_TRACES = ("receipt", "delivery_retry", "dead_letter", "redelivery")


def not_passed(f: Frames, sla_s: float, last_offset: int | None = None) -> DataFrame | None:
    """Return what working subscriptions have not passed by topic and tag, and must have; None if all passed the day.

    `last_offset`: the day's, if it is known.
    """
    on_time = before(F.lit(f.seen_at), sla_s)
    works = (F.col("works_since") <= on_time) & F.col("works_since").isNotNull()
    slowest = routes(f).where(works).agg(F.min("lowest").alias("lowest")).first()
    if slowest is None or slowest["lowest"] is None:
        return None
    if last_offset is not None and last_offset <= slowest["lowest"]:
        return None
    ahead = f.outbox.where((F.col("offset") > slowest["lowest"]) & (due_from() <= on_time))
    taken = takers(f, ahead.select("topic").distinct()).where(F.col("subscription_id").isNotNull() & works)
    return (
        ahead.join(F.broadcast(taken), "topic")
        .where((F.col("offset") > F.col("lowest")) & (F.col("offset") > F.col("started_after")))
        .where((F.col("committed_at") >= F.col("judged_from")) & tag_taken())
        .select(*DELIVERY, "offset", "name", F.col("headers").alias("wanted"), due_from().alias("due_from"))
    )


def late(f: Frames, ahead: DataFrame) -> DataFrame:
    """Return one row for each name of a subscription with late deliveries, in the schema LATE, of those that are
    `not_passed`. Two subscriptions have one name if the deletion of the first is not in its history.

    A delivery with any trace is not late here: it is over, or the rule retry_overdue judges it. Nor is a message whose
    half is gone, if the subscription filters by headers.
    """
    traces = [getattr(f, name).where("replay = 0").select(DELIVERY) for name in _TRACES]
    halves = f.half.select(*MESSAGE, F.col("headers").alias("sent"), F.lit(True).alias("has_half"))
    taken = F.col("wanted").isNull() | (F.col("has_half") & headers_taken(F.col("wanted"), F.col("sent")))
    return (
        ahead.join(reduce(DataFrame.unionByName, traces), DELIVERY, "left_anti")
        .join(halves, MESSAGE, "left")
        .where(taken)
        .groupBy("name")
        .agg(
            F.min_by("subscription_id", "offset").alias("subscription_id"),
            F.count("*").alias("messages"),
            F.min_by(message_id(), "offset").alias("first"),
            F.min("offset").alias("offset"),
            F.min("due_from").alias("due_from"),
        )
        .select(LATE.names)
    )
