"""The rule about a half's identity: what is stored is what was posted."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.transforms.finding import findings
from spark.transforms.joined import Joined


def half_altered(j: Joined) -> DataFrame:
    """The digest of a transaction's stored half messages is not the one that was stored when they were posted."""
    found = j.whole.altered
    assert found is not None
    return findings(found, j.day, "half_altered", "transaction_id", F.col("digest").alias("stored"), "computed")
