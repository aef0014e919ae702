"""Deliveries that are neither settled nor late: what keeps a day from being final."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.routes import routes, tag_taken, takers


def waiting(f: Frames, last_offset: int | None = None) -> DataFrame:
    """Return `transaction_id`, `position`, `subscription_id`, `replay` of what waits for a retry, also of a replay, or
    for its subscription's turn. What a deleted subscription has left waits for nothing.

    By topic and tag; a message that the headers' filter leaves out counts until the subscription has passed it.
    `last_offset`: the day's, if it is known.
    """
    delivery = ["transaction_id", "position", "subscription_id", "replay"]
    deleted = routes(f).where("deleted_at is not null").select("subscription_id")
    retried = f.delivery_retry.select(delivery).join(F.broadcast(deleted), "subscription_id", "left_anti")
    behind = routes(f).where("deleted_at is null").agg(F.min("lowest").alias("lowest")).first()
    if behind is None or behind["lowest"] is None:
        return retried
    if last_offset is not None and last_offset <= behind["lowest"]:
        return retried
    # Mostly nothing is left here, and the join costs nothing.
    ahead = f.outbox.where(F.col("offset") > behind["lowest"])
    taken = takers(f, ahead.select("topic").distinct()).where("subscription_id is not null and deleted_at is null")
    coming = ahead.join(F.broadcast(taken), "topic").where(
        (F.col("offset") > F.col("lowest")) & (F.col("offset") > F.col("started_after")) & tag_taken()
    )
    return retried.unionByName(coming.withColumn("replay", F.lit(0)).select(delivery)).distinct()
