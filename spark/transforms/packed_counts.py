"""Pack a row of the day into a few numbers that can be summed: counts in bit ranges of one number, hashes, and bits."""

from collections.abc import Mapping, Sequence
from functools import reduce
from types import MappingProxyType

from pyspark.sql import Column
from pyspark.sql import functions as F

# What is counted of a message, each in a lane with the given number of bits, in one of two numbers. `taker`: the
# subscriptions that ever took the message; `own`: it is Halfnote's own.
LANES = {"counts": (("half", "commit", "rollback", "outbox"), 15), "more": (("receipt", "taker", "own"), 20)}

# Subscriptions that filter by headers have one bit each instead: whether the half has the headers, and what the outbox
# has for the subscription, are in different rows and meet in the sum. This many subscriptions share a six-lane number.
ASKING = 10
ASKS = ("asked", "due", "matched", "began", "got_due", "got")


def row(
    position: Column,
    asking: Sequence[int],
    *,
    counts: Mapping[str, Column] = MappingProxyType({}),
    more: Mapping[str, Column] = MappingProxyType({}),
    hashes: Mapping[str, Column] = MappingProxyType({}),
    digest: Column | None = None,
    asks: Mapping[str, Column] = MappingProxyType({}),
    outcome: Mapping[str, Column] = MappingProxyType({}),
) -> list[Column]:
    """Return the columns of a gathered row: what is counted, by lane, hashes, and the transaction's `outcome`
    (see spark/transforms/outcomes.py). Null adds nothing."""
    return [
        id_hash().alias("suspect"),
        position.cast("int").alias("position"),
        _packed("counts", counts).alias("counts"),
        _packed("more", more).alias("more"),
        *(number(hashes.get(name)).alias(name) for name in ("due", "matched")),
        (F.lit(None) if digest is None else digest).cast("long").alias("digest"),
        *(number(outcome.get(name)).alias(name) for name in ("micros", "code")),
        *(_asks(name, asks).alias(name) for name in bits(asking)),
    ]


def bits(asking: Sequence[int]) -> list[str]:
    """Return the names of the numbers with a bit in each lane for each subscription that filters by headers."""
    return [f"asks_{first}" for first in range(0, len(asking), ASKING)]


def bits_of(asking: Sequence[int]) -> list[Column]:
    """Return the bit of `subscription_id` in its number; 0 in the other numbers and for other subscriptions."""
    columns = []
    for name, first in zip(bits(asking), range(0, len(asking), ASKING), strict=True):
        bit = F.lit(0).cast("long")
        for place, subscription_id in enumerate(asking[first : first + ASKING]):
            bit = F.when(F.col("subscription_id") == subscription_id, F.lit(1 << place).cast("long")).otherwise(bit)
        columns.append(bit.alias(name))
    return columns


def _asks(name: str, asks: Mapping[str, Column]) -> Column:
    parts = [
        F.when(holds, F.col(name) * F.lit(1 << ASKING * ASKS.index(lane))).otherwise(F.lit(0).cast("long"))
        for lane, holds in asks.items()
    ]
    return F.coalesce(reduce(lambda left, right: left + right, parts, F.lit(0).cast("long")), F.lit(0).cast("long"))


def bit_lane(name: str, lane: str) -> Column:
    """Return a lane's bits: the subscriptions that it holds for."""
    return F.shiftrightunsigned(name, ASKING * ASKS.index(lane)).bitwiseAND(F.lit((1 << ASKING) - 1))


def asked_of(name: str, lane: str) -> Column:
    """Return a lane's bits of those whose headers the half has."""
    return bit_lane(name, lane).bitwiseAND(bit_lane(name, "asked"))


def _packed(name: str, counted: Mapping[str, Column]) -> Column:
    lanes, bits = LANES[name]
    parts = [number(column) * F.lit(1 << bits * lanes.index(lane)) for lane, column in counted.items()]
    return reduce(lambda left, right: left + right, parts, F.lit(0).cast("long"))


def lane(name: str, lane: str) -> Column:
    """Return the count of a lane."""
    lanes, bits = LANES[name]
    return F.shiftrightunsigned(name, bits * lanes.index(lane)).bitwiseAND(F.lit((1 << bits) - 1))


def number(column: Column | None) -> Column:
    """Return a column as a number; 0 where there is none."""
    return F.lit(0).cast("long") if column is None else F.coalesce(column.cast("long"), F.lit(0).cast("long"))


def flag(condition: str) -> Column:
    """Return 1 where a condition holds, else 0."""
    return F.coalesce(F.expr(condition), F.lit(False)).cast("int")


def id_hash() -> Column:
    """Return the 64-bit hash of the transaction's id."""
    return F.xxhash64("transaction_id")
