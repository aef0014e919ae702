"""Write a generated day as Parquet in the proof's layout: a directory for each frame, and frames.json."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from spark.schemas import CHECKPOINT, FRAMES, PRODUCER_GROUP, SUBSCRIPTION, SUBSCRIPTION_VERSION
from spark.synthetic import ledgers
from spark.synthetic.chunk import chunk_of
from spark.synthetic.plan import GROUPS, INTERVAL_S, MAX_CHECKS, RULES, UNANSWERED_PARK_S, Plan

# Ids and digests never repeat; the values of other columns do.
_UNLIKE = ("transaction_id", "body_digest", "digest", "offset")


def fill(directory: Path, plan: Plan, chunk: int) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Generate a chunk and write it; return the rows by table and the planted faults. Raises TooFewError, OSError."""
    made = chunk_of(plan, chunk)
    for name, rows in made.tables.items():
        write(directory / name / f"part-{chunk:05}.parquet", rows.select(FRAMES[name].names))
    if plan.ledgers is not None:
        ledgers.write(plan.ledgers, chunk, made.ledgers)
    return {name: rows.num_rows for name, rows in made.tables.items()}, made.planted


def finish(directory: Path, plan: Plan) -> None:
    """Write the small frames and frames.json."""
    at = plan.subscribed_at
    subscriptions = [
        {
            "subscription_id": id_,
            "name": made.name,
            "topics": list(made.topics),
            "filters": made.filters,
            "state": "active",
            "started_after": plan.first_offset - 1,
            "matches_since": at,
            "created_at": at,
            "deleted_at": None,
        }
        for id_, made in zip(plan.ids, plan.subscriptions(), strict=True)
    ]
    versions = [
        {**row, "version_id": number, "at": at, "ordered": "none", "shards": made.shards}
        for number, (row, made) in enumerate(zip(subscriptions, plan.subscriptions(), strict=True), 1)
    ]
    checkpoints = [
        {"subscription_id": id_, "shards": made.shards, "shard": shard, "offset": plan.last_offset}
        for id_, made in zip(plan.ids, plan.subscriptions(), strict=True)
        for shard in range(made.shards)
    ]
    policy = {"interval_s": INTERVAL_S, "max_checks": MAX_CHECKS, "unanswered_park_s": UNANSWERED_PARK_S}
    groups = [{"name": name, **policy, "on_exhausted": "rollback"} for name in (*GROUPS, *plan.refused_groups)]
    for name, schema, rows in (
        ("subscription", SUBSCRIPTION, subscriptions),
        ("subscription_version", SUBSCRIPTION_VERSION, versions),
        ("checkpoint", CHECKPOINT, checkpoints),
        ("producer_group", PRODUCER_GROUP, groups),
    ):
        write(directory / name / "part-00000.parquet", pa.Table.from_pylist(rows, _arrow(schema)))
    description = {"day": plan.day.isoformat(), "seen_at": plan.seen_at.astimezone(UTC).isoformat(), "rules": RULES}
    # The day was never closed.
    description["receipts_since"] = f"{plan.day.isoformat()}T00:00:00+00:00"
    (directory / "frames.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def write(path: Path, rows: pa.Table) -> None:
    """Write a file and make its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    alike = [name for name in rows.column_names if name not in _UNLIKE]
    pq.write_table(rows, path, use_dictionary=alike)


_TYPES = {
    "string": pa.string(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<string>": pa.list_(pa.string()),
}


def _arrow(schema: StructType) -> pa.Schema:
    return pa.schema([(column.name, _TYPES[column.dataType.simpleString()]) for column in schema.fields])


def default_seen_at(plan: Plan) -> datetime:
    """Return the time four days after the day's end, when the day can be final."""
    return datetime.fromtimestamp(plan.begins_us / 1e6 + 5 * 86_400, UTC)
