"""A day's transactions by birth time, outcome, decider, and time to the verdict.

A transaction's values come from rows of several tables and are summed: `micros`, the time from birth to verdict, and
`code`, all other values in one number.
"""

from datetime import UTC, date, datetime
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.packed_counts import id_hash

QUARTERS = 96
# Lower bounds of the buckets of all durations: 1, 2, 5, 10 ms … 500,000 s. The first also takes shorter ones, the
# last longer ones.
FROM_MS = tuple(step * 10**power for power in range(9) for step in (1, 2, 5))
COUNTED = ("quarter", "outcome", "source", "bucket")
# In `code`: the quarter, that it was born, verdict, source, that it is parked.
_BORN, _VERDICT, _SOURCE, _PARKED = 1 << 7, 1 << 8, 1 << 10, 1 << 12


def of_half(day: date) -> dict[str, Column]:
    """Return `micros` and `code` of a half; they are its first message's."""
    midnight = F.lit(int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000)
    quarter = F.floor((F.unix_micros("born_at") - midnight) / F.lit(900_000_000))
    quarter = F.least(F.greatest(quarter, F.lit(0)), F.lit(QUARTERS - 1)).cast("long")
    first = F.col("position") == 0
    return {"micros": F.when(first, -F.unix_micros("born_at")), "code": F.when(first, quarter + _BORN)}


def of_op() -> dict[str, Column]:
    """Return `micros` and `code` of a verdict."""
    return {"micros": F.unix_micros("decided_at"), "code": F.expr(f"verdict * {_VERDICT}L + source * {_SOURCE}L")}


def of_parked() -> dict[str, Column]:
    """Return `micros` and `code` of a parked transaction's row in check_back."""
    return {"micros": F.lit(0), "code": F.lit(_PARKED)}


def outcomes(f: Frames) -> DataFrame:
    """Count the day's transactions by COUNTED, see `counted`, in a pass of its own."""
    known = (
        _by_id(f.half.where("position = 0"), of_half(f.day)),
        _by_id(f.op, of_op()),
        _by_id(f.check_back.where("state = 2"), of_parked()),
    )
    # Each row occurs once, so a partial aggregation gains nothing; a join would sort both sides.
    together = reduce(DataFrame.unionByName, known).repartition("id").groupBy("id")
    summed = together.agg(F.sum("micros").alias("micros"), F.bit_or("code").alias("code"))
    return counted(summed).where("outcome is not null")


def counted(summed: DataFrame, *by: str) -> DataFrame:
    """Return `count` of transactions by COUNTED, and by the columns `by` as well, from the sums of each transaction.

    `quarter` of the day, from 0; `outcome`, null without a half; if decided, `source` and the `bucket` of FROM_MS.
    """
    verdict = F.expr(f"code div {_VERDICT} % 4")
    decided = verdict > 0
    outcome = (
        F.when(F.expr(f"code div {_BORN} % 2 = 0"), F.lit(None))
        .when(verdict == 1, "committed")
        .when(verdict == 2, "rolled_back")
        .when(F.expr(f"code >= {_PARKED}"), "parked")
        .otherwise("undecided")
    )
    labeled = summed.select(
        *by,
        F.expr(f"code % {_BORN}").alias("quarter"),
        outcome.alias("outcome"),
        F.when(decided, F.expr(f"code div {_SOURCE} % 4")).alias("source"),
        bucket(F.when(decided, F.col("micros"))).alias("bucket"),
    )
    return labeled.groupBy(*by, *COUNTED).count()


def bucket(micros: Column) -> Column:
    """Return the place in FROM_MS of a duration in microseconds; null stays null. Powers of ten are exact here."""
    at_least = F.greatest(micros, F.lit(1000))
    power = F.floor(F.log10(at_least))
    first = at_least / F.pow(F.lit(10.0), power)
    step = F.when(first >= 5, 2).when(first >= 2, 1).otherwise(0)
    place = F.least((power - 3) * 3 + step, F.lit(len(FROM_MS) - 1))
    # greatest() and least() ignore nulls.
    return F.when(micros.isNotNull(), place.cast("int"))


def _by_id(frame: DataFrame, known: dict[str, Column]) -> DataFrame:
    return frame.select(id_hash().alias("id"), *(value.cast("long").alias(name) for name, value in known.items()))
