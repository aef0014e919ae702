"""Reads the ledgers of producers and consumers into spark/schemas.py's schemas; docs/ledgers.md has the formats.

A row that cannot be read is counted by reason and set aside, never dropped silently. The source is read only once, into
a staging directory, so that all rows show the same state of a database.
"""

from functools import reduce
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from spark import schemas
from spark.engine.filesystem import FAILURES
from spark.sources import ledger_topics
from spark.sources.ledger_files import LedgerError, Wanted, failure_of_read, read

# A UUIDv7, with or without hyphens (databases without the type keep 32 hex digits).
_UUID = "([0-9a-f]{8})-?([0-9a-f]{4})-?(7[0-9a-f]{3})-?([89ab][0-9a-f]{3})-?([0-9a-f]{12})"
_TRANSACTION_ID = f"^{_UUID}$"
_MESSAGE_ID = f"^{_UUID}-(0|[1-9][0-9]{{0,4}})$"
COMMITS = ("commit", "committed", "true", "t")
ROLLBACKS = ("rollback", "rolled_back", "rolled back", "false", "f")
# What a missing column has, where an empty value says something. No text of Postgres or of an end has this character.
UNSAID = "\0"
PRODUCER = {
    "transaction_id": Wanted(("string", "binary")),
    "verdict": Wanted(("string", "boolean")),
    "end_decided_at": Wanted(("string", "timestamp", "timestamp_ntz"), optional=True),
    "end_reason": Wanted(("string",), optional=True, default=UNSAID),
}
CONSUMER = {
    "message_id": Wanted(("string",)),
    "times_seen": Wanted(("string", "byte", "short", "integer", "long"), optional=True, default="1"),
    "subscription": Wanted(("string",), optional=True),
    "answered_status": Wanted(("string", "byte", "short", "integer", "long"), optional=True),
}


class Ledger(NamedTuple):
    """`rows` in the contract's schema; `set_aside` (source, reason, given: the row as JSON or the line as it was); and
    `counts`: `read`, `kept` (rows after merging), `merged` (into others) and `set_aside`, by reason.
    """

    rows: DataFrame
    set_aside: DataFrame
    counts: dict[str, Any]


def producer_ledger(spark: SparkSession, spec: str, staging_dir: str, *, complete: bool = False) -> Ledger:
    """Read PRODUCER_LEDGER. Rows of one transaction that agree are merged, those that contradict each other set aside.

    `complete`: the ledger may have no rows.

    Reasons: malformed_line, bad_transaction_id, unknown_verdict, bad_end_decided_at, contradictory. Raises LedgerError
    (wrong usage) and RunFailedError.
    """
    found = _read(spark, spec, PRODUCER, staging_dir)
    transaction_id = _canonical("transaction_id", _TRANSACTION_ID, "$1-$2-$3-$4-$5")
    said = F.lower(F.trim("verdict"))
    verdict = F.when(said.isin(*COMMITS), "commit").when(said.isin(*ROLLBACKS), "rollback")
    decided_at = F.trim("end_decided_at").try_cast("timestamp")
    reason = (
        F.when(F.col("line").isNotNull(), "malformed_line")
        .when(transaction_id.isNull(), "bad_transaction_id")
        .when(verdict.isNull(), "unknown_verdict")
        .when(_unreadable("end_decided_at", decided_at), "bad_end_decided_at")
    )
    read_rows = found.select(
        "source",
        reason.alias("reason"),
        _given(PRODUCER),
        transaction_id,
        verdict.alias("verdict"),
        decided_at.alias("end_decided_at"),
        F.nullif(F.coalesce("end_reason", F.lit("")), F.lit(UNSAID)).alias("end_reason"),
    )
    staged = _first_staged(read_rows, f"{staging_dir}/read", spec)
    by_id = staged.where("reason is null").groupBy("transaction_id")
    values = ("verdict", "end_decided_at", "end_reason")
    differ = [F.coalesce(F.min(name) != F.max(name), F.lit(False)) for name in values]
    merged = _staged(
        by_id.agg(
            *(F.min(name).alias(name) for name in values),
            reduce(Column.__or__, differ).alias("contradictory"),
        ),
        f"{staging_dir}/merged",
    )
    contradictory = staged.where("reason is null").join(
        merged.where("contradictory").select("transaction_id"), "transaction_id", "left_semi"
    )
    aside = staged.where("reason is not null").unionByName(contradictory.withColumn("reason", F.lit("contradictory")))
    rows = merged.where("not contradictory").select(*schemas.PRODUCER_LEDGER.names)
    return _ledger(spec, staged, rows, aside, "--producer-ledger-complete" if not complete else None)


def consumer_ledger(spark: SparkSession, spec: str, staging_dir: str, *, complete: bool = False) -> Ledger:
    """Read CONSUMER_LEDGER. Rows of one message and subscription are merged: their times_seen are added.

    `complete`: the ledger may have no rows.

    Reasons: malformed_line, bad_message_id, bad_times_seen, bad_answered_status. Raises LedgerError (wrong usage) and
    RunFailedError.
    """
    found = _read(spark, spec, CONSUMER, staging_dir)
    message_id = _canonical("message_id", _MESSAGE_ID, "$1-$2-$3-$4-$5-$6")
    times = F.trim("times_seen").try_cast("bigint")
    status = F.trim("answered_status").try_cast("int")
    subscription = F.when(F.trim("subscription") != "", F.trim("subscription")).alias("subscription")
    reason = (
        F.when(F.col("line").isNotNull(), "malformed_line")
        .when(message_id.isNull(), "bad_message_id")
        .when(times.isNull() | (times < 0), "bad_times_seen")
        .when(_unreadable("answered_status", status) | ~status.between(100, 599), "bad_answered_status")
    )
    read_rows = found.select(
        "source",
        reason.alias("reason"),
        _given(CONSUMER),
        message_id,
        times.alias("times_seen"),
        subscription,
        status.alias("status"),
    )
    staged = _first_staged(read_rows, f"{staging_dir}/read", spec)
    by_id = staged.where("reason is null").groupBy("message_id", "subscription")
    merged = _staged(
        by_id.agg(F.sum("times_seen").alias("times_seen"), F.array_sort(F.collect_set("status")).alias("answered")),
        f"{staging_dir}/merged",
    )
    rows, aside = merged.select(*schemas.CONSUMER_LEDGER.names), staged.where("reason is not null")
    return _ledger(spec, staged, rows, aside, "--consumer-ledger-complete" if not complete else None)


def _read(spark: SparkSession, spec: str, columns: dict[str, Wanted], staging_dir: str) -> DataFrame:
    if spec.startswith(ledger_topics.SCHEME):
        return ledger_topics.read_topic(spark, spec, columns, f"{staging_dir}/topic")
    return read(spark, spec, columns)


def write_set_aside(ledger: Ledger, directory: str) -> None:
    """Write the rows that were set aside, if any, as CSV into a directory."""
    if ledger.counts["set_aside"]:
        ledger.set_aside.coalesce(1).write.mode("overwrite").options(header=True, escape='"').csv(directory)


def _canonical(name: str, pattern: str, form: str) -> Column:
    """Return an id in its canonical form, or null if the text is not an id."""
    text = F.lower(F.trim(name))
    return F.when(text.rlike(pattern), F.regexp_replace(text, pattern, form)).alias(name)


def _unreadable(name: str, read: Column) -> Column:
    return read.isNull() & (F.trim(name) != "")


def _given(columns: dict[str, Wanted]) -> Column:
    """Return the unchanged row, so that a person can correct it."""
    values = (F.nullif(F.col(name), F.lit(UNSAID)).alias(name) for name in columns)
    return F.coalesce("line", F.to_json(F.struct(*values))).alias("given")


def _staged(frame: DataFrame, place: str) -> DataFrame:
    """Write a frame and return the written frame."""
    frame.write.mode("overwrite").parquet(place)
    return frame.sparkSession.read.schema(frame.schema).parquet(place)


def _first_staged(frame: DataFrame, place: str, spec: str) -> DataFrame:
    """Write a frame of the source itself, and return the written frame. Raises LedgerError and RunFailedError."""
    try:
        return _staged(frame, place)
    except FAILURES as error:
        raise failure_of_read(error, spec) from error


def _ledger(spec: str, staged: DataFrame, rows: DataFrame, aside: DataFrame, declaration: str | None) -> Ledger:
    """Count the rows. Raise LedgerError if none can be used, because then nothing, or the wrong thing, is compared.

    `declaration`: the option that allows a ledger without rows; None if it is given.
    """
    set_aside = aside.select("source", "reason", "given")
    by_reason = {row.reason: row["count"] for row in set_aside.groupBy("reason").count().collect()}
    read_count, kept, left = staged.count(), rows.count(), sum(by_reason.values())
    if not read_count and declaration is not None:
        raise LedgerError(f"{spec.partition('?')[0]} has no rows; if that is right, add {declaration}")
    if read_count and not kept:
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(by_reason.items()))
        raise LedgerError(f"{spec.partition('?')[0]}: none of its {read_count} rows can be used ({reasons})")
    counts = {"read": read_count, "kept": kept, "merged": read_count - kept - left, "set_aside": by_reason}
    return Ledger(rows, set_aside, counts)
