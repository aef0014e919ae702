"""What the rules read: the tables of one day, as of one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType


@dataclass(frozen=True)
class Frames:
    """One day's rows, in the schemas of spark/schemas.py.

    `half` to `redelivery` hold the rows of the day's ids only; `subscription`, `checkpoint` and `producer_group` are
    whole. `seen_at` is the time of the snapshot, aware. `rules` is the table shared_rule: seconds and counts by name.
    """

    day: date
    seen_at: datetime
    half: DataFrame
    op: DataFrame
    outbox: DataFrame
    receipt: DataFrame
    attempt: DataFrame
    check_back: DataFrame
    delivery_retry: DataFrame
    dead_letter: DataFrame
    redelivery: DataFrame
    subscription: DataFrame
    checkpoint: DataFrame
    producer_group: DataFrame
    rules: Mapping[str, float] = field(default_factory=dict)
    # What a person has sent once more from then on left a receipt. None: a closed day takes none, or it is not known.
    receipts_since: datetime | None = None
    # SAME_OFFSET's columns, where an earlier day that is still stored has any.
    same_offset: DataFrame | None = None
    # How many rows each frame has, as far as that is known.
    rows: Mapping[str, int] = field(default_factory=dict)
    # What the producers' and the consumers' own databases say, where they were given.
    producer_ledger: DataFrame | None = None
    consumer_ledger: DataFrame | None = None
    # That the producers' has all that they committed; and the groups of which it has anything of the day.
    producer_ledger_complete: bool = False
    ledger_groups: frozenset[str] = frozenset()
    # ARCHIVE's columns as the day's archive has them, None if they cannot be read; the manifest written with it; what
    # the tables hold now; and, by table or other file, what is wrong with the archive's files, in words.
    archive: DataFrame | None = None
    archive_manifest: Mapping[str, Any] | None = None
    found_manifest: Mapping[str, Any] | None = None
    archive_problems: Mapping[str, Sequence[str]] = field(default_factory=dict)


def empty(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a frame without rows. One made of Python's rows would need Python where the executors are."""
    return spark.range(0).select(*(F.lit(None).cast(field.dataType).alias(field.name) for field in schema.fields))


def staged(frame: DataFrame, place: str, schema: StructType) -> DataFrame:
    """Write a frame to `place` and return what was written, so that nobody computes it again."""
    frame.write.option("compression", "zstd").parquet(place)
    return frame.sparkSession.read.schema(schema).parquet(place)
