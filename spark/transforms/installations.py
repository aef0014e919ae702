"""Rules over several installations: ids that two of them have, and what a ledger has that none of them has."""

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.finding import findings
from spark.transforms.joined import Joined

KIND = "in_two_installations"
# Findings about rows of a ledger that an installation does not have. Another one may have them.
OF_LEDGERS = ("ledger_disagrees", "ledger_not_sent", "consumed_twice", "consumed_not_sent")
# Kinds whose search is complete only if every installation was read.
OF_ALL = frozenset({KIND, *OF_LEDGERS})


def ids(half: DataFrame) -> DataFrame:
    """Return the transactions of a day."""
    return half.where("position = 0").select("transaction_id")


def shared(halves: Mapping[str, DataFrame]) -> DataFrame:
    """Return SHARED of a day: the transactions that more than one installation has. `halves`: by name."""
    names = sorted(halves)
    # A number for each installation, because a set of names for each row of a day needs far more memory.
    each = [ids(halves[name]).withColumn("bit", F.lit(1 << place).cast("long")) for place, name in enumerate(names)]
    by_id = reduce(DataFrame.unionByName, each).groupBy("transaction_id").agg(F.bit_or("bit").alias("bits"))
    has = [F.when(F.col("bits").bitwiseAND(1 << place) != 0, F.lit(name)) for place, name in enumerate(names)]
    several = by_id.where(F.bit_count("bits") > 1)
    return several.select("transaction_id", F.array_compact(F.array(*has)).alias("installations"))


def in_two_installations(j: Joined) -> DataFrame:
    """Another installation has a half with the same transaction id."""
    across = j.whole.across
    assert across is not None
    here = across.shared.where(F.array_contains("installations", across.name))
    return findings(here, j.day, KIND, "transaction_id", "installations")


def judged_here(found: DataFrame, f: Frames) -> DataFrame:
    """Return the findings without those about rows of a ledger that another installation has, or reports.

    A ledger may have the transactions of several installations, because a producer may use more than one.
    """
    across = f.across
    if across is None or (f.producer_ledger is None and f.consumer_ledger is None):
        return found
    of_ledgers = F.col("kind").isin(*OF_LEDGERS)
    wanted = F.broadcast(found.where(of_ledgers).select("transaction_id").distinct())
    here, beyond = (
        one.join(wanted, "transaction_id", "left_semi").distinct() for one in (ids(f.half), across.elsewhere)
    )
    own = found.where(of_ledgers).join(here, "transaction_id", "left_semi")
    unknown = found.where(of_ledgers).join(here.unionByName(beyond).distinct(), "transaction_id", "left_anti")
    kept = found.where(~of_ledgers).unionByName(own)
    return kept.unionByName(unknown) if across.complete and across.speaks else kept
