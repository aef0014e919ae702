"""Rules about the log: one offset for each message, in the order of commit times."""

from pyspark.sql import Column, DataFrame, Window, WindowSpec
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.finding import findings
from spark.transforms.joined import Joined

# One partition sorts this many offsets; the borders between partitions are compared afterwards.
SPAN = 65_536


def breaks(outbox: DataFrame, span: int = SPAN) -> DataFrame:
    """Return the few places of the log that `disorder` reads: those out of order with the one before in their
    range of `span` offsets, and each range's `first` and `last`.

    Ordered within ranges, so that no day is too large for one partition. Columns as `disorder` has them.
    """
    rows = outbox.select("offset", "committed_at", F.expr(f"offset div {span}").alias("span"))
    window = Window.partitionBy("span").orderBy("offset", "committed_at")
    last = F.lead("offset").over(window).isNull()
    ordered = rows.withColumns({**_before(window), "last": last})
    first = F.col("before_offset").isNull()
    return ordered.withColumn("first", first).where(F.col("first") | F.col("last") | _disordered()).drop("span")


def disorder(found: DataFrame) -> DataFrame:
    """Return the places of the log (`offset`, `committed_at`) that are out of order with the last one (`before_offset`,
    `before_at`): the same offset once more, or an earlier time. A place is there once for each such row.

    `found`: the log's `breaks`.
    """
    # Few enough for one partition.
    borders = Window.partitionBy(F.lit(0)).orderBy("offset", "committed_at")
    at_borders = found.where("first or last").withColumns(_before(borders)).where("first")
    columns = ("offset", "committed_at", "before_offset", "before_at")
    return found.select(*columns).unionByName(at_borders.select(*columns)).where(_disordered())


def doubled(f: Frames, disorder: DataFrame) -> DataFrame:
    """Return the messages (`transaction_id`, `position`, `offset`) of the day, and of earlier ones, at offsets that are
    there more than once. `disorder`: of the day."""
    twice = disorder.where("offset = before_offset").select("offset")
    outbox = f.outbox.select("transaction_id", "position", "offset")
    if f.same_offset is not None:
        twice = twice.unionByName(f.same_offset.select("offset"))
        outbox = outbox.unionByName(f.same_offset)
    return outbox.join(F.broadcast(twice.distinct()), "offset", "left_semi")


def offset_of_two_messages(j: Joined) -> DataFrame:
    """Two messages or more have the same offset: of the day, or one of them of an earlier day."""
    ids = F.array_sort(F.collect_set(F.concat_ws("-", "transaction_id", "position"))).alias("messages")
    found = j.doubled.groupBy("offset").agg(ids).where("size(messages) > 1")
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
