"""Find the transactions that are suspect by a producer's or consumer's ledger: one more shuffle for each ledger."""

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.frames import Frames
from spark.transforms.ledgers import MOST_MICROS, committed_of, covered
from spark.transforms.packed_counts import flag

# Rows of one transaction: of the ledger, by verdict, of ops, and whether its producer's ledger is complete.
_COUNTS = ("said_commit", "said_rollback", "ops", "commits", "spoken_of")
# Of the ledger, and of the op: the time in microseconds, and the hash of the reason.
_VALUES = ("end_decided_at", "decided_at", "end_reason", "reason")
_DIFFERS = f"""
commits = 0 and said_commit > 0
or commits > 0 and (said_rollback > 0 or spoken_of > 0 and said_commit = 0)
or ops = 0 and said_rollback > 0 and end_decided_at is not null
or abs(end_decided_at - decided_at) >= {MOST_MICROS} or abs(least_end_decided_at - decided_at) >= {MOST_MICROS}
or end_reason <> reason or least_end_reason <> reason
"""
# Hashes of names are added up in 64 bits: shorter by these, 65,536 of one message fit.
_SHORTER_BITS = 16


def by_ledgers(f: Frames, suspect: Column) -> list[DataFrame]:
    """Return the transactions (`suspect`: their ids or the hashes of these) on which a ledger and the tables may
    disagree."""
    by_ledgers = []
    if f.producer_ledger is not None:
        by_ledgers.append(_by_producers(f, f.producer_ledger, suspect))
    if f.consumer_ledger is not None:
        by_ledgers.append(_by_consumers(f, f.consumer_ledger, suspect))
        said = f.consumer_ledger.where("size(answered) > 0")
        if not said.isEmpty():
            by_ledgers.append(_by_answers(f, said, suspect))
    return by_ledgers


def _by_producers(f: Frames, ledger: DataFrame, suspect: Column) -> DataFrame:
    """Transactions whose ledger and op differ; also committed ones that a complete ledger lacks."""
    rows = [
        ledger.select(
            *_said(
                suspect,
                {f"said_{verdict}": f"verdict = '{verdict}'" for verdict in ("commit", "rollback")},
                end_decided_at=F.unix_micros("end_decided_at"),
                end_reason=F.when(F.col("end_reason").isNotNull(), F.xxhash64("end_reason")),
            )
        ),
        f.op.select(
            *_said(
                suspect,
                {"ops": "true", "commits": "verdict = 1"},
                decided_at=F.unix_micros("decided_at"),
                reason=F.when(F.col("source") == 0, F.xxhash64(F.coalesce("reason", F.lit("")))),
            )
        ),
    ]
    if f.ledger_groups:
        rows.append(committed_of(f).select(*_said(suspect, {"spoken_of": "true"})))
    sums = (F.sum(name).alias(name) for name in _COUNTS)
    values = (F.max(name).alias(name) for name in _VALUES)
    # Rows of one transaction may say different things.
    least = (F.min(name).alias(f"least_{name}") for name in ("end_decided_at", "end_reason"))
    summed = reduce(DataFrame.unionByName, rows).groupBy("suspect").agg(*sums, *values, *least)
    return summed.where(_DIFFERS).select("suspect")


def _said(suspect: Column, conditions: Mapping[str, str], **values: Column) -> list[Column]:
    counts = (flag(conditions.get(name, "false")).alias(name) for name in _COUNTS)
    given = (values.get(name, F.lit(None)).cast("long").alias(name) for name in _VALUES)
    return [suspect.alias("suspect"), *counts, *given]


def _by_answers(f: Frames, said: DataFrame, suspect: Column) -> DataFrame:
    """Transactions with a receipt whose status a consumer did not answer, by any row of the ledger."""
    answers = said.select("transaction_id", "position", "answered")
    received = f.receipt.where("outcome = 'delivered' and status is not null")
    both = received.join(answers, ["transaction_id", "position"])
    return both.where(~F.array_contains("answered", F.col("status"))).select(suspect.alias("suspect"))


def _by_consumers(f: Frames, ledger: DataFrame, suspect: Column) -> DataFrame:
    """Transactions with a message on which the ledger and the receipts may disagree.

    They include each message that a ledger has by name and that has no receipt, so no other rows are read here. The
    names of both are compared by the sums of their hashes, because an exclusive or loses a name that occurs twice.
    """
    names = F.broadcast(covered(f.subscription, ledger))
    received = f.receipt.where("outcome = 'delivered'").join(names, "subscription_id")
    rows = [
        f.outbox.select(*_seen(suspect, F.col("position"), sent=F.lit(1))),
        received.select(*_seen(suspect, F.col("position"), received=F.lit(1), by=_hash("name"))),
        ledger.select(
            *_seen(
                suspect,
                F.col("position"),
                consumed=F.lit(1),
                once=flag("times_seen = 1"),
                unnamed=flag("subscription is null"),
                by=F.when(F.col("subscription").isNotNull(), -_hash("subscription")),
            )
        ),
    ]
    sums = (F.sum(name).alias(name) for name in ("sent", "received", "consumed", "once", "unnamed"))
    by = F.coalesce(F.try_sum("by"), F.lit(1)).alias("by")
    summed = reduce(DataFrame.unionByName, rows).groupBy("suspect", "position").agg(*sums, by)
    same = "consumed = received and by = 0 or consumed = 1 and unnamed = 1 and received > 0"
    plain = f"consumed + received = 0 or sent > 0 and once = consumed and ({same})"
    return summed.where(f"not ({plain})").select("suspect")


def _seen(suspect: Column, position: Column, **values: Column) -> list[Column]:
    columns = ("sent", "received", "consumed", "once", "unnamed", "by")
    given = [F.coalesce(values.get(name, F.lit(0)), F.lit(0)).cast("long").alias(name) for name in columns]
    return [suspect.alias("suspect"), position.cast("int").alias("position"), *given]


def _hash(name: str) -> Column:
    return F.shiftright(F.xxhash64(name), _SHORTER_BITS)
