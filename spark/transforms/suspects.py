"""Find the suspect transactions: one pass over the day selects the few that the rules must examine.

One shuffle groups all rows of the day, packed into a few numbers, by a hash of their transaction's id. Two aggregations
(by message, by transaction) test whether the rows are complete and agree. Sets of subscriptions are compared by the xor
of their hashes. A transaction that fails a test is a suspect; the rules then judge all its rows by full ids. So a false
suspect costs only time. To miss one takes two faulty transactions whose 64-bit hashes are the same, or faults whose
xors cancel.
"""

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.joined import POLICY
from spark.transforms.ledger_suspects import by_ledgers
from spark.transforms.outcomes import counted, of_half, of_op, of_parked
from spark.transforms.packed_counts import asked_of, bit_lane, bits, bits_of, flag, id_hash, lane, row
from spark.transforms.routes import headers_taken, is_reserved, must_be_there, routes, tag_taken


def screened(f: Frames, sla_s: float, taking: DataFrame) -> DataFrame:
    """Count the day's transactions as `outcomes` does, and also by `suspect`: the hash of a suspect transaction, null
    for all others. `taking`: `takers` of the outbox's topics.

    One pass computes both, because it groups a transaction's rows anyway.
    """
    asking = _asking(taking)
    by_message = (
        _gathered(f, sla_s, taking, asking)
        .groupBy("suspect", "position")
        .agg(
            F.sum("counts").alias("counts"),
            F.sum("more").alias("more"),
            *(F.bit_xor(name).alias(name) for name in ("due", "matched", *bits(asking))),
            (F.min("digest") != F.max("digest")).alias("differs"),
            *_summed_outcome(),
        )
    )
    half, outbox = lane("counts", "half"), lane("counts", "outbox")
    by_transaction = by_message.groupBy("suspect").agg(
        F.sum(lane("counts", "commit")).alias("commits"),
        F.sum(lane("counts", "rollback")).alias("rollbacks"),
        F.sum(((half > 0) & (outbox == 0)).cast("int")).alias("unpublished"),
        F.sum((outbox > 0).cast("int")).alias("published"),
        F.bool_or(_wrong(half, outbox, bits(asking))).alias("wrong"),
        (F.max("position") + 1).alias("messages"),
        *_summed_outcome(),
    )
    committed = F.expr("commits = 1 and rollbacks = 0 and unpublished = 0 and published = messages")
    rolled_back = F.expr("commits = 0 and rollbacks = 1 and published = 0 and unpublished = messages")
    odd = F.col("wrong") | ~(committed | rolled_back)
    return counted(by_transaction.withColumn("suspect", F.when(odd, F.col("suspect"))), "suspect")


def named(f: Frames) -> DataFrame:
    """Return the hashes (`suspect`) of transactions that are suspect without a pass over the whole day.

    These are in the small tables, have a refused end or more checks than their policies allow, or may disagree with a
    ledger.
    """
    frames = (f.check_back, f.delivery_retry, f.dead_letter, f.redelivery, f.attempt.where("kind = 'refused'"))
    by_tables = [frame.select(id_hash().alias("suspect")) for frame in (*frames, _asked_beyond(f))]
    return reduce(DataFrame.unionByName, [*by_tables, *by_ledgers(f, id_hash())]).distinct()


def _asking(taking: DataFrame) -> list[int]:
    """Return the subscriptions that filter by headers and take any of the day's topics. A message that any other
    subscription with header filters got is suspect."""
    asking = taking.where("headers is not null").select("subscription_id").distinct()
    return sorted(row["subscription_id"] for row in asking.collect())


def _summed_outcome() -> tuple[Column, Column]:
    return F.sum("micros").alias("micros"), F.bit_or("code").alias("code")


def _gathered(f: Frames, sla_s: float, taking: DataFrame, asking: Sequence[int]) -> DataFrame:
    """Return the day's rows as numbers, those of one transaction in one partition."""
    of_ops = {name: flag(f"verdict = {number}") for number, name in ((1, "commit"), (2, "rollback"))}
    parts = [
        _halves(f, taking, asking),
        f.op.select(*row(F.lit(0), asking, counts=of_ops, outcome=of_op())),
        _receipts(f, asking),
        _outbox(f, sla_s, taking, asking),
    ]
    if f.rows.get("check_back") != 0:
        parts.append(f.check_back.where("state = 2").select(*row(F.lit(0), asking, outcome=of_parked())))
    if f.archive is not None:
        parts.append(f.archive.select(*row(F.col("position"), asking, digest=F.xxhash64("body_digest"))))
    # By the transaction alone, so that the second aggregation needs no second shuffle.
    return reduce(DataFrame.unionByName, parts).repartition("suspect")


def _halves(f: Frames, taking: DataFrame, asking: Sequence[int]) -> DataFrame:
    """Each row once for each taker that filters by headers, at least once: only the half has the headers."""
    digest, outcome = F.xxhash64("body_digest"), of_half(f.day)
    if not asking:
        return f.half.select(*row(F.col("position"), asking, counts={"half": F.lit(1)}, digest=digest, outcome=outcome))
    first = F.row_number().over(Window.partitionBy("topic").orderBy("subscription_id")) == 1
    of_topic = taking.where("headers is not null").withColumn("first", first)
    # A wanted value is in the text unchanged, or there is a backslash; the same holds for a wanted pair as Postgres
    # writes it, and only the pair has that text. To parse all of the JSON takes ten times as long.
    name, value = (F.element_at(of(F.col("headers")), 1) for of in (F.map_keys, F.map_values))
    one = F.concat(F.lit('"'), value, F.lit('"')).alias("one")
    only = F.when(F.size("headers") == 1, F.concat(F.lit('"'), name, F.lit('": "'), value, F.lit('"'))).alias("only")
    wanted = of_topic.select("topic", "tags", "first", F.col("headers").alias("wanted"), one, only, *bits_of(asking))
    escaped = F.contains(F.col("headers"), F.lit("\\"))
    plainly = ~escaped & F.coalesce(F.contains(F.col("headers"), F.col("only")), F.lit(False))
    may_be = F.contains(F.col("headers"), F.col("one")) | escaped
    asked = tag_taken() & may_be & (plainly | headers_taken(F.col("wanted"), F.col("headers")))
    # A half without takers counts as a first one too.
    first_of_half = F.coalesce("first", F.lit(True))
    route = F.when(first_of_half, _route())
    return f.half.join(F.broadcast(wanted), "topic", "left").select(
        *row(
            F.col("position"),
            asking,
            counts={"half": first_of_half},
            # The takers' hashes cancel those of the outbox, or the message is suspect.
            hashes={"due": route, "matched": route},
            digest=F.when(first_of_half, digest),
            asks={"asked": F.col("wanted").isNotNull() & asked},
            outcome={name: F.when(first_of_half, value) for name, value in outcome.items()},
        )
    )


def _receipts(f: Frames, asking: Sequence[int]) -> DataFrame:
    """A live receipt counts for its subscription. A receipt from before a change of topics and filters is left out of
    `due`, because its message is left out of the expected deliveries."""
    asked = routes(f).select("subscription_id", "judged_from", *bits_of(asking))
    plain = ~F.col("subscription_id").isin(asking) if asking else F.lit(True)
    live = F.when((F.col("replay") == 0) & plain, F.xxhash64("subscription_id"))
    earlier = F.coalesce(F.col("first_at") < F.col("judged_from"), F.lit(False))
    return f.receipt.join(F.broadcast(asked), "subscription_id", "left").select(
        *row(
            F.col("position"),
            asking,
            more={"receipt": F.lit(1)},
            hashes={"due": F.when(~earlier, live), "matched": live},
            digest=F.when(F.col("digest").isNotNull(), F.xxhash64("digest")),
            asks={"got_due": (F.col("replay") == 0) & ~earlier, "got": F.col("replay") == 0},
        )
    )


def _outbox(f: Frames, sla_s: float, taking: DataFrame, asking: Sequence[int]) -> DataFrame:
    """Each row once for each taker of its topic, or once if there is none."""
    every = taking.withColumns(dict(zip(bits(asking), bits_of(asking), strict=True)))
    taken = F.col("subscription_id").isNotNull() & tag_taken()
    plain = taken & F.col("headers").isNull()
    due = must_be_there(F.lit(f.seen_at), sla_s)
    matched = F.col("offset") > F.col("started_after")
    matched &= F.col("matches_until").isNull() | (F.col("committed_at") <= F.col("matches_until"))
    began = matched & (F.col("deleted_at").isNull() | (F.col("committed_at") < F.col("deleted_at")))
    began &= (F.col("committed_at") >= F.col("matches_since")) | (F.col("offset") > F.col("lowest"))
    nothing = F.lit(0).cast("long")
    route = F.when(F.col("place") == 0, _route()).otherwise(nothing) if asking else nothing
    hashes = {
        name: F.when(plain & holds, F.col("taker")).otherwise(nothing).bitwiseXOR(route)
        for name, holds in (("due", due), ("matched", matched))
    }
    return f.outbox.join(F.broadcast(every), "topic").select(
        *row(
            F.col("position"),
            asking,
            counts={"outbox": F.col("place") == 0},
            more={"own": is_reserved("topic"), "taker": plain & began},
            hashes=hashes,
            asks={"due": taken & due, "matched": taken & matched, "began": taken & began},
        )
    )


def _route() -> Column:
    return F.xxhash64("topic", "tag")


def _wrong(half: Column, outbox: Column, bits: Sequence[str]) -> Column:
    """The faults of a message that do not depend on the verdict."""
    receipts, takers, own = (lane("more", name) for name in ("receipt", "taker", "own"))
    misdelivered = [
        reduce(Column.__or__, [asked_of(name, should) != bit_lane(name, got) for name in bits], F.col(should) != 0)
        for should, got in (("due", "got_due"), ("matched", "got"))
    ]
    untaken = reduce(Column.__and__, [asked_of(name, "began") == 0 for name in bits], takers == 0)
    return (
        F.coalesce("differs", F.lit(False))
        | (half > 1)
        | (outbox > 1)
        | (
            (outbox > 0)
            & ((half == 0) | (misdelivered[0] & misdelivered[1]) | (untaken & (own == 0) & (receipts == 0)))
        )
        | ((outbox == 0) & (receipts > 0))
    )


def _asked_beyond(f: Frames) -> DataFrame:
    """Checks are numbered from 1 in order, so a transaction with more answers than its limit has a number beyond it, or
    one that no check has."""
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
        return answered.where(_beyond(F.lit(fewest)))
    beyond = answered.where(_beyond(F.lit(min(fewest, lowest[0]))))
    return beyond.join(own, "transaction_id", "left").where(_beyond(F.coalesce("own", F.lit(fewest))))


def _beyond(most: Column) -> Column:
    return (F.col("number") > most) | (F.col("number") < 1)
