"""Rules about the log: one offset for one message, in the order of the times."""

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F

from spark.transforms.finding import findings
from spark.transforms.joined import Joined

# So many offsets are put in order by one partition; what is at the borders is compared afterwards.
SPAN = 65_536


def disorder(outbox: DataFrame, span: int = SPAN) -> DataFrame:
    """Return the places of the log (`offset`, `committed_at`) that do not follow from the one before (`before_offset`,
    `before_at`): the same offset once more, or an earlier time. A place is there once for each such row.

    Ordered within ranges of `span` offsets, so that no day is too large for one partition.
    """
    rows = outbox.select("offset", "committed_at", F.expr(f"offset div {span}").alias("span"))
    window = Window.partitionBy("span").orderBy("offset", "committed_at")
    ordered = rows.withColumns({**_before(window), "last": F.lead("offset").over(window).isNull()})
    # The first and the last of each range: few, so that one partition takes them.
    ends = ordered.where(F.col("last") | F.col("before_offset").isNull())
    over_ends = Window.partitionBy(F.lit(0)).orderBy("offset", "committed_at")
    first = F.col("before_offset").isNull()
    at_borders = ends.withColumn("first", first).withColumns(_before(over_ends)).where("first")
    columns = ("offset", "committed_at", "before_offset", "before_at")
    return ordered.select(*columns).unionByName(at_borders.select(*columns)).where(_disordered())


def offset_of_two_messages(j: Joined) -> DataFrame:
    """Two messages or more have the same offset."""
    twice = j.disorder.where("offset = before_offset").select("offset").distinct()
    ids = F.array_sort(F.collect_set(F.concat_ws("-", "transaction_id", "position"))).alias("messages")
    found = j.whole.outbox.join(F.broadcast(twice), "offset").groupBy("offset").agg(ids).where("size(messages) > 1")
    return findings(found, j.day, "offset_of_two_messages", F.col("offset"), "messages")


def offsets_contradict_time(j: Joined) -> DataFrame:
    """An offset of the day is higher than the one before it, and its message was committed earlier."""
    found = j.disorder.where("committed_at < before_at").dropDuplicates(["offset"])
    detail = ("committed_at", "before_offset", "before_at")
    return findings(found, j.day, "offsets_contradict_time", F.col("offset"), *detail)


def _before(window: WindowSpec) -> dict[str, Column]:
    return {
        "before_offset": F.lag("offset").over(window),
        "before_at": F.lag("committed_at").over(window),
    }


def _disordered() -> Column:
    return (F.col("offset") <= F.col("before_offset")) | (F.col("committed_at") < F.col("before_at"))
