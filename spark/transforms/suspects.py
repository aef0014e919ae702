"""Which transactions the rules must look at: one pass over the day finds the few in which anything can be wrong.

All rows of the day, cut down to a handful of numbers, come together by a hash of their transaction's id, in one
shuffle; two aggregations over it (by message, by transaction) tell whether everything is there that belongs together.
Sets of subscriptions are compared by the xor of their hashes. What is not plainly in order is a suspect; the rules then
judge it, with all its rows, by its full ids. So a suspect too many costs time and nothing else. One too few would take
two transactions, both at fault, whose 64-bit hashes are the same, or faults whose xors cancel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from spark.at_once import at_once
from spark.frames import Frames, empty
from spark.schemas import BIG, OF_DAY
from spark.transforms.joined import POLICY
from spark.transforms.ledgers import covered
from spark.transforms.routes import RESERVED, headers_taken, must_be_there, routes, tag_taken

# What is counted of a message, each in a lane of so many bits of one of two numbers. `taker`: subscriptions that ever
# took the message; `own`: it is Halfnote's own.
_LANES = {"counts": (("half", "commit", "rollback", "outbox"), 15), "more": (("receipt", "taker", "own"), 20)}

# Subscriptions that ask for headers have a bit each instead: whether the half has the headers, and what the outbox says
# of the subscription, are of different rows and meet in the sum. So many subscriptions have a number of six lanes.
_ASKING = 10
_ASKS = ("asked", "due", "matched", "began", "got_due", "got")

# Those of a day that have rows of a transaction; subscription, checkpoint and producer_group stay whole.
OF_TRANSACTIONS = (*BIG, *OF_DAY, "archive", "producer_ledger", "consumer_ledger")


def suspects(f: Frames, sla_s: float, taking: DataFrame) -> DataFrame:
    """Return the hashes (`suspect`, distinct) of the transactions in which a rule may find something.

    `taking`: `takers` of the outbox's topics.
    """
    asking = [row["subscription_id"] for row in routes(f).where("headers is not null").collect()]
    by_message = (
        _gathered(f, sla_s, taking, asking)
        .groupBy("suspect", "position")
        .agg(
            F.sum("counts").alias("counts"),
            F.sum("more").alias("more"),
            *(F.bit_xor(name).alias(name) for name in ("due", "matched", *_bits(asking))),
            (F.min("digest") != F.max("digest")).alias("differs"),
        )
    )
    half, outbox = _lane("counts", "half"), _lane("counts", "outbox")
    by_transaction = by_message.groupBy("suspect").agg(
        F.sum(_lane("counts", "commit")).alias("commits"),
        F.sum(_lane("counts", "rollback")).alias("rollbacks"),
        F.sum(((half > 0) & (outbox == 0)).cast("int")).alias("unpublished"),
        F.sum((outbox > 0).cast("int")).alias("published"),
        F.bool_or(_wrong(half, outbox, _bits(asking))).alias("wrong"),
    )
    committed = F.expr("commits = 1 and rollbacks = 0 and unpublished = 0 and published > 0")
    rolled_back = F.expr("commits = 0 and rollbacks = 1 and published = 0 and unpublished > 0")
    screened = by_transaction.where(F.col("wrong") | ~(committed | rolled_back)).select("suspect")
    return reduce(DataFrame.unionByName, [screened, *_named(f), *_by_ledgers(f)]).distinct()


def narrowed(f: Frames, found: DataFrame, keep: Callable[[DataFrame], DataFrame]) -> Frames:
    """Return the frames with the rows of suspects only, each passed to `keep`; what is known to be empty stays so."""
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS if f.rows.get(name) != 0}
    theirs = {name: _among(found, one) for name, one in frames.items() if one is not None}
    kept: list[Any] = at_once([partial(keep, one) for one in theirs.values()])
    return replace(f, **dict(zip(theirs, kept, strict=True)))


def nothing_of(f: Frames) -> Frames:
    """Return the frames as `narrowed` leaves them where there are no suspects, without looking at the day again."""
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS}
    empties: dict[str, Any] = {
        name: empty(one.sparkSession, one.schema) for name, one in frames.items() if one is not None
    }
    return replace(f, **empties)


def _gathered(f: Frames, sla_s: float, taking: DataFrame, asking: Sequence[int]) -> DataFrame:
    """Return the day's rows as numbers, those of one transaction in one partition."""
    of_ops = {name: _flag(f"verdict = {number}") for number, name in ((1, "commit"), (2, "rollback"))}
    parts = [
        _halves(f, taking, asking),
        f.op.select(*_row(F.lit(0), asking, counts=of_ops)),
        _receipts(f, asking),
        _outbox(f, sla_s, taking, asking),
    ]
    if f.archive is not None:
        parts.append(f.archive.select(*_row(F.col("position"), asking, digest=F.xxhash64("body_digest"))))
    # By the transaction alone, so that the second aggregation finds its rows where the first left them.
    return reduce(DataFrame.unionByName, parts).repartition("suspect")


def _halves(f: Frames, taking: DataFrame, asking: Sequence[int]) -> DataFrame:
    """Each row as often as its topic has takers that ask for headers, at least once: the half alone knows those."""
    digest = F.xxhash64("body_digest")
    if not asking:
        return f.half.select(*_row(F.col("position"), asking, counts={"half": F.lit(1)}, digest=digest))
    first = F.row_number().over(Window.partitionBy("topic").orderBy("subscription_id")) == 1
    of_topic = taking.where("headers is not null").withColumn("first", first)
    # A wanted value stands in the text as it is, or there is a backslash. Reading all of it takes far longer.
    one = F.concat(F.lit('"'), F.element_at(F.map_values("headers"), 1), F.lit('"')).alias("one")
    wanted = of_topic.select("topic", "tags", "first", F.col("headers").alias("wanted"), one, *_bits_of(asking))
    may_be = F.contains(F.col("headers"), F.col("one")) | F.contains(F.col("headers"), F.lit("\\"))
    asked = tag_taken() & may_be & headers_taken(F.col("wanted"), F.col("headers"))
    # A half without takers is a first one too.
    first_of_half = F.coalesce("first", F.lit(True))
    route = F.when(first_of_half, _route())
    return f.half.join(F.broadcast(wanted), "topic", "left").select(
        *_row(
            F.col("position"),
            asking,
            counts={"half": first_of_half},
            # What the takers were told by goes out against the outbox's, or the message is suspect.
            hashes={"due": route, "matched": route},
            digest=F.when(first_of_half, digest),
            asks={"asked": F.col("wanted").isNotNull() & asked},
        )
    )


def _receipts(f: Frames, asking: Sequence[int]) -> DataFrame:
    """A live receipt stands for its subscription; one from before a change of topics and filters is left out of `due`,
    as what it is for is left out of what must be there."""
    asked = routes(f).select(
        "subscription_id", "judged_from", F.col("headers").isNull().alias("plain"), *_bits_of(asking)
    )
    live = F.when((F.col("replay") == 0) & F.coalesce("plain", F.lit(True)), F.xxhash64("subscription_id"))
    earlier = F.coalesce(F.col("first_at") < F.col("judged_from"), F.lit(False))
    return f.receipt.join(F.broadcast(asked), "subscription_id", "left").select(
        *_row(
            F.col("position"),
            asking,
            more={"receipt": F.lit(1)},
            hashes={"due": F.when(~earlier, live), "matched": live},
            digest=F.when(F.col("digest").isNotNull(), F.xxhash64("digest")),
            asks={"got_due": (F.col("replay") == 0) & ~earlier, "got": F.col("replay") == 0},
        )
    )


def _outbox(f: Frames, sla_s: float, taking: DataFrame, asking: Sequence[int]) -> DataFrame:
    """Each row as often as its topic has takers, once without any."""
    every = taking.withColumns(dict(zip(_bits(asking), _bits_of(asking), strict=True)))
    taken = F.col("subscription_id").isNotNull() & tag_taken()
    plain = taken & F.col("headers").isNull()
    due = must_be_there(F.lit(f.seen_at), sla_s)
    matched = F.col("offset") > F.col("started_after")
    began = matched & (F.col("deleted_at").isNull() | (F.col("committed_at") < F.col("deleted_at")))
    nothing = F.lit(0).cast("long")
    route = F.when(F.col("place") == 0, _route()).otherwise(nothing) if asking else nothing
    hashes = {
        name: F.when(plain & holds, F.col("taker")).otherwise(nothing).bitwiseXOR(route)
        for name, holds in (("due", due), ("matched", matched))
    }
    return f.outbox.join(F.broadcast(every), "topic").select(
        *_row(
            F.col("position"),
            asking,
            counts={"outbox": F.col("place") == 0},
            more={"own": F.startswith("topic", F.lit(RESERVED)), "taker": plain & began},
            hashes=hashes,
            asks={"due": taken & due, "matched": taken & matched, "began": taken & began},
        )
    )


def _route() -> Column:
    return F.xxhash64("topic", "tag")


def _wrong(half: Column, outbox: Column, bits: Sequence[str]) -> Column:
    """What is wrong with a message, whatever the verdict."""
    receipts, takers, own = (_lane("more", name) for name in ("receipt", "taker", "own"))
    misdelivered = [
        reduce(Column.__or__, [_asked(name, should) != _bit_lane(name, got) for name in bits], F.col(should) != 0)
        for should, got in (("due", "got_due"), ("matched", "got"))
    ]
    untaken = reduce(Column.__and__, [_asked(name, "began") == 0 for name in bits], takers == 0)
    return (
        F.coalesce("differs", F.lit(False))
        | (half > 1)
        | (outbox > 1)
        | ((outbox > 0) & ((half == 0) | (misdelivered[0] & misdelivered[1]) | (untaken & (own == 0))))
        | ((outbox == 0) & (receipts > 0))
    )


def _named(f: Frames) -> list[DataFrame]:
    """Those in the small tables, with a refused end, or that were asked more often than their policies want."""
    frames = (f.check_back, f.delivery_retry, f.dead_letter, f.redelivery, f.attempt.where("kind = 'refused'"))
    return [frame.select(_hash().alias("suspect")) for frame in (*frames, _asked_beyond(f))]


def _asked_beyond(f: Frames) -> DataFrame:
    """Checks are numbered as they come, so there are no more answers than the highest number."""
    of_groups = f.producer_group.agg(F.min("max_checks")).first()
    fewest = min([float(f.rules["max_checks"]), *(float(n) for n in of_groups or () if n is not None)])
    own = (
        f.half.where("policy is not null")
        .select("transaction_id", F.from_json("policy", POLICY)["max_checks"].alias("own"))
        .where("own is not null")
    )
    answered = f.attempt.where("kind = 'check' and outcome = 'unknown'").select("transaction_id", "number")
    lowest = own.agg(F.min("own")).first()
    if lowest is None or lowest[0] is None:
        return answered.where(F.col("number") > fewest)
    beyond = answered.where(F.col("number") > min(fewest, lowest[0]))
    return beyond.join(own, "transaction_id", "left").where(F.col("number") > F.coalesce("own", F.lit(fewest)))


def _by_ledgers(f: Frames) -> list[DataFrame]:
    by_ledgers = []
    if f.producer_ledger is not None:
        by_ledgers.append(_by_producers(f, f.producer_ledger))
    if f.consumer_ledger is not None:
        by_ledgers.append(_by_consumers(f, f.consumer_ledger))
    return by_ledgers


def _by_producers(f: Frames, ledger: DataFrame) -> DataFrame:
    """Those whose ledger and op are not the same."""
    said = ledger.select(
        _hash().alias("suspect"),
        *(_flag(f"verdict = '{verdict}'").alias(f"said_{verdict}") for verdict in ("commit", "rollback")),
        F.lit(0).alias("commits"),
    )
    done = f.op.select(
        _hash().alias("suspect"),
        F.lit(0).alias("said_commit"),
        F.lit(0).alias("said_rollback"),
        _flag("verdict = 1").alias("commits"),
    )
    sums = (F.sum(name).alias(name) for name in ("said_commit", "said_rollback", "commits"))
    summed = said.unionByName(done).groupBy("suspect").agg(*sums)
    return summed.where("commits = 0 and said_commit > 0 or commits > 0 and said_rollback > 0").select("suspect")


def _by_consumers(f: Frames, ledger: DataFrame) -> DataFrame:
    """Those with a message that the ledger and the receipts do not plainly agree about."""
    names = F.broadcast(covered(f.subscription, ledger))
    received = f.receipt.where("outcome = 'delivered'").join(names, "subscription_id")
    rows = [
        f.outbox.select(*_seen(F.col("position"), sent=F.lit(1))),
        received.select(*_seen(F.col("position"), received=F.lit(1), by=F.xxhash64("name"))),
        ledger.select(
            *_seen(
                F.col("position"),
                consumed=F.lit(1),
                times=F.col("times_seen"),
                unnamed=_flag("subscription is null"),
                by=F.when(F.col("subscription").isNotNull(), F.xxhash64("subscription")),
            )
        ),
    ]
    sums = (F.sum(name).alias(name) for name in ("sent", "received", "consumed", "times", "unnamed"))
    summed = reduce(DataFrame.unionByName, rows).groupBy("suspect", "position").agg(*sums, F.bit_xor("by").alias("by"))
    same = "consumed = received and by = 0 or consumed = 1 and unnamed = 1 and received > 0"
    plain = f"consumed + received = 0 or sent > 0 and times = consumed and ({same})"
    return summed.where(f"not ({plain})").select("suspect")


def _seen(position: Column, **values: Column) -> list[Column]:
    columns = ("sent", "received", "consumed", "times", "unnamed", "by")
    given = [F.coalesce(values.get(name, F.lit(0)), F.lit(0)).cast("long").alias(name) for name in columns]
    return [_hash().alias("suspect"), position.cast("int").alias("position"), *given]


def _row(
    position: Column,
    asking: Sequence[int],
    *,
    counts: Mapping[str, Column] = MappingProxyType({}),
    more: Mapping[str, Column] = MappingProxyType({}),
    hashes: Mapping[str, Column] = MappingProxyType({}),
    digest: Column | None = None,
    asks: Mapping[str, Column] = MappingProxyType({}),
) -> list[Column]:
    """Return the columns of a gathered row: what is counted, by lane, and hashes; what is null adds nothing."""
    return [
        _hash().alias("suspect"),
        position.cast("int").alias("position"),
        _packed("counts", counts).alias("counts"),
        _packed("more", more).alias("more"),
        *(_number(hashes.get(name)).alias(name) for name in ("due", "matched")),
        (F.lit(None) if digest is None else digest).cast("long").alias("digest"),
        *(_asks(name, asks).alias(name) for name in _bits(asking)),
    ]


def _bits(asking: Sequence[int]) -> list[str]:
    """Return the names of the numbers that have a bit in each lane for each subscription that asks for headers."""
    return [f"asks_{first}" for first in range(0, len(asking), _ASKING)]


def _bits_of(asking: Sequence[int]) -> list[Column]:
    """Return which bit stands for `subscription_id`, in the number of its own; 0 in the others, and for the others."""
    columns = []
    for name, first in zip(_bits(asking), range(0, len(asking), _ASKING), strict=True):
        bit = F.lit(0).cast("long")
        for place, subscription_id in enumerate(asking[first : first + _ASKING]):
            bit = F.when(F.col("subscription_id") == subscription_id, F.lit(1 << place).cast("long")).otherwise(bit)
        columns.append(bit.alias(name))
    return columns


def _asks(name: str, asks: Mapping[str, Column]) -> Column:
    parts = [
        F.when(holds, F.col(name) * F.lit(1 << _ASKING * _ASKS.index(lane))).otherwise(F.lit(0).cast("long"))
        for lane, holds in asks.items()
    ]
    return F.coalesce(reduce(lambda left, right: left + right, parts, F.lit(0).cast("long")), F.lit(0).cast("long"))


def _bit_lane(name: str, lane: str) -> Column:
    return F.shiftrightunsigned(name, _ASKING * _ASKS.index(lane)).bitwiseAND(F.lit((1 << _ASKING) - 1))


def _asked(name: str, lane: str) -> Column:
    """Return a lane's bits of those whose headers the half has."""
    return _bit_lane(name, lane).bitwiseAND(_bit_lane(name, "asked"))


def _packed(name: str, counted: Mapping[str, Column]) -> Column:
    lanes, bits = _LANES[name]
    parts = [_number(column) * F.lit(1 << bits * lanes.index(lane)) for lane, column in counted.items()]
    return reduce(lambda left, right: left + right, parts, F.lit(0).cast("long"))


def _lane(name: str, lane: str) -> Column:
    lanes, bits = _LANES[name]
    return F.shiftrightunsigned(name, bits * lanes.index(lane)).bitwiseAND(F.lit((1 << bits) - 1))


def _number(column: Column | None) -> Column:
    return F.lit(0).cast("long") if column is None else F.coalesce(column.cast("long"), F.lit(0).cast("long"))


def _flag(condition: str) -> Column:
    return F.coalesce(F.expr(condition), F.lit(False)).cast("int")


def _among(found: DataFrame, frame: DataFrame) -> DataFrame:
    return frame.join(found, F.xxhash64(frame["transaction_id"]) == found["suspect"], "left_semi")


def _hash() -> Column:
    return F.xxhash64("transaction_id")
