"""Rules about identity: what is stored is what was posted, and what was published is what is stored."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.transforms.finding import findings, message_id
from spark.transforms.joined import Joined


def half_altered(j: Joined) -> DataFrame:
    """The digest of a transaction's stored half messages is not the one that was stored when they were posted."""
    found = j.whole.altered
    assert found is not None
    return findings(found, j.day, "half_altered", "transaction_id", F.col("digest").alias("stored"), "computed")


def published_differs(j: Joined) -> DataFrame:
    """A message in the outbox has another topic, key, tag or due time than its half."""
    found = j.whole.differing
    assert found is not None
    # A message with two offsets can differ twice.
    first = found.groupBy("transaction_id", "position", "producer_group").agg(
        F.min("offset").alias("offset"), F.min_by("differs", "offset").alias("differs")
    )
    return findings(first, j.day, "published_differs", message_id(), "offset", "differs")
