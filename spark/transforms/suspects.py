"""Which transactions the rules must look at: one pass over the day finds the few in which anything can be wrong.

All rows of the day, cut down to a handful of numbers, come together by a hash of their transaction's id, in one
shuffle; two aggregations over it (by message, by transaction) tell whether everything is there that belongs together.
Sets of subscriptions are compared by the xor of their hashes. What is not plainly in order is a suspect; the rules then
judge it, with all its rows, by its full ids. So a suspect too many costs time and nothing else. One too few would take
two transactions, both at fault, whose 64-bit hashes are the same, or faults whose xors cancel.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import reduce
from types import MappingProxyType
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.schemas import BIG, OF_DAY
from spark.transforms.ledgers import covered
from spark.transforms.routes import RESERVED, headers_taken, must_be_there, routes, tag_taken, takers

# What is counted of a message, each in a lane of so many bits of one of two numbers. `taker`: subscriptions that ever
# took the message; `own`: it is Halfnote's own.
_LANES = {"counts": (("half", "commit", "rollback", "outbox"), 15), "more": (("receipt", "taker", "own"), 20)}

# Those of a day that have rows of a transaction; subscription, checkpoint and producer_group stay whole.
OF_TRANSACTIONS = (*BIG, *OF_DAY, "archive", "producer_ledger", "consumer_ledger")


def suspects(f: Frames, sla_s: float) -> DataFrame:
    """Return the hashes (`suspect`, distinct) of the transactions in which a rule may find something."""
    by_message = (
        _gathered(f, sla_s)
        .groupBy("suspect", "position")
        .agg(
            F.sum("counts").alias("counts"),
            F.sum("more").alias("more"),
            F.bit_xor("due").alias("due"),
            F.bit_xor("matched").alias("matched"),
            (F.min("digest") != F.max("digest")).alias("differs"),
        )
    )
    half, outbox = _lane("counts", "half"), _lane("counts", "outbox")
    by_transaction = by_message.groupBy("suspect").agg(
        F.sum(_lane("counts", "commit")).alias("commits"),
        F.sum(_lane("counts", "rollback")).alias("rollbacks"),
        F.sum(((half > 0) & (outbox == 0)).cast("int")).alias("unpublished"),
        F.sum((outbox > 0).cast("int")).alias("published"),
        F.bool_or(_wrong(half, outbox)).alias("wrong"),
    )
    committed = F.expr("commits = 1 and rollbacks = 0 and unpublished = 0 and published > 0")
    rolled_back = F.expr("commits = 0 and rollbacks = 1 and published = 0 and unpublished > 0")
    screened = by_transaction.where(F.col("wrong") | ~(committed | rolled_back)).select("suspect")
    return reduce(DataFrame.unionByName, [screened, *_named(f), *_by_ledgers(f)]).distinct()


def narrowed(f: Frames, found: DataFrame, keep: Callable[[DataFrame], DataFrame]) -> Frames:
    """Return the frames with the rows of suspects only, each passed to `keep`; what is known to be empty stays so."""
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS if f.rows.get(name) != 0}
    kept: dict[str, Any] = {name: keep(_among(found, one)) for name, one in frames.items() if one is not None}
    return replace(f, **kept)


def nothing_of(f: Frames) -> Frames:
    """Return the frames as `narrowed` leaves them where there are no suspects, without looking at the day again."""
    frames = {name: getattr(f, name) for name in OF_TRANSACTIONS}
    empties = {
        name: one.sparkSession.createDataFrame([], one.schema) for name, one in frames.items() if one is not None
    }
    return replace(f, **empties)


def _gathered(f: Frames, sla_s: float) -> DataFrame:
    """Return the day's rows as numbers, those of one transaction in one partition."""
    parts = [
        f.half.select(*_row(F.col("position"), counts={"half": F.lit(1)}, digest=F.xxhash64("body_digest"))),
        f.op.select(
            *_row(F.lit(0), counts={name: _flag(f"verdict = {n}") for n, name in ((1, "commit"), (2, "rollback"))})
        ),
        _receipts(f),
        *_outbox(f, sla_s),
    ]
    if f.archive is not None:
        parts.append(f.archive.select(*_row(F.col("position"), digest=F.xxhash64("body_digest"))))
    # By the transaction alone, so that the second aggregation finds its rows where the first left them.
    return reduce(DataFrame.unionByName, parts).repartition("suspect")


def _receipts(f: Frames) -> DataFrame:
    """A live receipt stands for its subscription; one from before a change of topics and filters is left out of `due`,
    as what it is for is left out of what must be there."""
    asked = F.broadcast(routes(f).select("subscription_id", "judged_from"))
    live = F.when(F.col("replay") == 0, F.xxhash64("subscription_id"))
    earlier = F.coalesce(F.col("first_at") < F.col("judged_from"), F.lit(False))
    return f.receipt.join(asked, "subscription_id", "left").select(
        *_row(
            F.col("position"),
            more={"receipt": F.lit(1)},
            hashes={"due": F.when(~earlier, live), "matched": live},
            digest=F.when(F.col("digest").isNotNull(), F.xxhash64("digest")),
        )
    )


def _outbox(f: Frames, sla_s: float) -> list[DataFrame]:
    """Each row as often as its topic has takers, once without any; and again for those that ask for headers."""
    every = takers(f, f.outbox.select("topic").distinct())
    plain = F.col("subscription_id").isNotNull() & F.col("headers").isNull() & tag_taken()
    own = F.startswith("topic", F.lit(RESERVED))
    rows = [
        f.outbox.join(F.broadcast(every), "topic").select(
            *_row(
                F.col("position"),
                counts={"outbox": F.col("place") == 0},
                more={"own": own, "taker": plain & _began()},
                hashes=_taken(f, plain, sla_s),
            )
        )
    ]
    if f.subscription.where("from_json(filters, 'headers map<string, string>').headers is not null").isEmpty():
        return rows
    asking = every.where("headers is not null")
    asked = f.outbox.join(F.broadcast(asking), "topic").where(tag_taken())
    sent = f.half.where("headers is not null").select("transaction_id", "position", F.col("headers").alias("sent"))
    taken = asked.join(sent, ["transaction_id", "position"]).where(headers_taken(F.col("headers"), F.col("sent")))
    return [
        *rows,
        taken.select(*_row(F.col("position"), more={"taker": _began()}, hashes=_taken(f, F.lit(True), sla_s))),
    ]


def _began() -> Column:
    return (F.col("offset") > F.col("started_after")) & (
        F.col("deleted_at").isNull() | (F.col("committed_at") < F.col("deleted_at"))
    )


def _taken(f: Frames, takes: Column, sla_s: float) -> dict[str, Column]:
    due = takes & must_be_there(F.lit(f.seen_at), sla_s)
    matched = takes & (F.col("offset") > F.col("started_after"))
    return {"due": F.when(due, F.col("taker")), "matched": F.when(matched, F.col("taker"))}


def _wrong(half: Column, outbox: Column) -> Column:
    """What is wrong with a message, whatever the verdict."""
    receipts, takers, own = (_lane("more", name) for name in ("receipt", "taker", "own"))
    misdelivered = (F.col("due") != 0) & (F.col("matched") != 0)
    return (
        F.coalesce("differs", F.lit(False))
        | (half > 1)
        | (outbox > 1)
        | ((outbox > 0) & ((half == 0) | misdelivered | ((takers == 0) & (own == 0))))
        | ((outbox == 0) & (receipts > 0))
    )


def _named(f: Frames) -> list[DataFrame]:
    """Those in the small tables, with a refused end, or that were asked more than once."""
    attempts = f.attempt.where("kind = 'refused' or (kind = 'check' and outcome = 'unknown' and number > 1)")
    frames = (f.check_back, f.delivery_retry, f.dead_letter, f.redelivery, attempts)
    return [frame.select(_hash().alias("suspect")) for frame in frames]


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
    *,
    counts: Mapping[str, Column] = MappingProxyType({}),
    more: Mapping[str, Column] = MappingProxyType({}),
    hashes: Mapping[str, Column] = MappingProxyType({}),
    digest: Column | None = None,
) -> list[Column]:
    """Return the columns of a gathered row: what is counted, by lane, and hashes; what is null adds nothing."""
    return [
        _hash().alias("suspect"),
        position.cast("int").alias("position"),
        _packed("counts", counts).alias("counts"),
        _packed("more", more).alias("more"),
        *(_number(hashes.get(name)).alias(name) for name in ("due", "matched")),
        (F.lit(None) if digest is None else digest).cast("long").alias("digest"),
    ]


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
