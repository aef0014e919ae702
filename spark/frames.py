"""The input of the rules: the tables of one day in one snapshot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

# A change or a deletion of a subscription reaches every worker within this time.
CHANGE_SETTLES_S = 60


@dataclass(frozen=True)
class Across:
    """What a run over several installations knows of a day in the other ones.

    `name`: of the installation whose day it is. `shared`: SHARED, the transactions that more than one has. `elsewhere`:
    the ids (`transaction_id`) of the other ones. `complete`: every installation was read. `speaks`: this one reports
    what is in no installation.
    """

    name: str
    shared: DataFrame
    elsewhere: DataFrame
    complete: bool
    speaks: bool


@dataclass(frozen=True)
class Frames:
    """One day's rows, in the schemas of spark/schemas.py.

    `half` to `redelivery` hold the rows of the day's ids only; `subscription`, `subscription_version`, `checkpoint` and
    `producer_group` are whole. `seen_at` is the time of the snapshot, aware. `rules` is the table shared_rule: seconds
    and counts by name.
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
    subscription_version: DataFrame
    checkpoint: DataFrame
    producer_group: DataFrame
    rules: Mapping[str, float] = field(default_factory=dict)
    # Redeliveries since this time have left a receipt. None: the day is closed and accepts no receipt, or it is
    # unknown.
    receipts_since: datetime | None = None
    # SAME_OFFSET: messages of other stored days at offsets of this day, if there are any.
    same_offset: DataFrame | None = None
    # ALTERED: the transactions whose half is not the one that was posted. None: no digest was computed.
    altered: DataFrame | None = None
    # DIFFERING: the messages that differ from their halves, or whose times disagree. None: they were not compared.
    differing: DataFrame | None = None
    # WRONG_RECEIPT: the receipts that the relay cannot have written. None: they were not compared.
    wrong_receipt: DataFrame | None = None
    # WRONG_DELIVERY: the retries, dead letters and drops that the service cannot have written. None: not compared.
    wrong_delivery: DataFrame | None = None
    # DIFFERING_SUBSCRIPTION: subscriptions that are not as their history says. None: they were not compared.
    differing_subscription: DataFrame | None = None
    # NEVER_DUE: the subscriptions with retries that are due later than planned. None: they were not compared.
    never_due: DataFrame | None = None
    # READY_RETRY: the retries that are the next message of their key. None: they were not looked for.
    ready_retry: DataFrame | None = None
    # OUT_OF_ORDER: the receipts that contradict the order of their key. None: they were not compared.
    out_of_order: DataFrame | None = None
    # WITHOUT_EVIDENCE: the verdicts that lack evidence, and evidence without its verdict. None: it was not compared.
    without_evidence: DataFrame | None = None
    # AUDIT_BROKEN: the breaks of the audit's chain. None: it was not compared.
    audit_broken: DataFrame | None = None
    # REPLAY_INCOMPLETE: the replays that are over and lack receipts. None: they were not compared.
    replay_incomplete: DataFrame | None = None
    # REPLAYING: the replays that still have to read messages of the day. None: they were not looked for.
    replaying: DataFrame | None = None
    # What each subscription takes and must have got, computed once; see spark/transforms/routes.py.
    routes: DataFrame | None = None
    # The Parquet files of the frames, and of `archive`, if this process can read them; see spark/transforms/screen/.
    files: Mapping[str, Sequence[str]] | None = None
    # The number of rows of each frame, if it is known.
    rows: Mapping[str, int] = field(default_factory=dict)
    # The frames that are known to have no rows, by name. They were read or compared all the same.
    nothing: frozenset[str] = frozenset()
    # The ledgers of producers and consumers, if they are given.
    producer_ledger: DataFrame | None = None
    consumer_ledger: DataFrame | None = None
    # Whether the producers' ledger has all their commits; and the groups that have any row of the day in it.
    producer_ledger_complete: bool = False
    ledger_groups: frozenset[str] = frozenset()
    # The day's archive: its rows in ARCHIVE's columns (None if they cannot be read), its manifest, the present manifest
    # of the tables, and the faults of its files as texts, by table or other file.
    archive: DataFrame | None = None
    archive_manifest: Mapping[str, Any] | None = None
    found_manifest: Mapping[str, Any] | None = None
    archive_problems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # The differences from the day's certificate (spark/proof/certify.py). None: the day has no certificate.
    certified: Sequence[Mapping[str, Any]] | None = None
    # What other installations have. None: the run proves one installation.
    across: Across | None = None
    # The topics, groups and subscriptions that have far less than usual, as rows of findings; see
    # spark/transforms/absence.py. None: they were not compared.
    absent: Sequence[Mapping[str, Any]] | None = None


def empty(spark: SparkSession, schema: StructType) -> DataFrame:
    """Return a frame without rows. A frame from Python rows would need Python on the executors.

    One text of SQL is one call of Java. Spark leaves out of a plan what a frame without rows cannot change.
    """
    columns = (f"cast(null as {field.dataType.simpleString()}) as `{field.name}`" for field in schema.fields)
    return spark.sql(f"select {', '.join(columns)} where false")


def staged(frame: DataFrame, place: str, schema: StructType) -> DataFrame:
    """Write a frame to `place` and return the written frame, so that it is not computed again."""
    frame.write.option("compression", "zstd").parquet(place)
    return frame.sparkSession.read.schema(schema).parquet(place)
