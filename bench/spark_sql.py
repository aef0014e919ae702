"""The proof's rules as plain SQL in Postgres and in DuckDB: their findings and their time."""

import json
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from string import Template

import duckdb

from app.ids import day_bounds
from app.models import DAY_TABLES
from app.store.retention.days import partition_name
from bench.stage import connected

HERE = Path(__file__).parent
# An hour, as in the proof's default.
SLA_S = 3600
Found = frozenset[tuple[str, str]]
FOUND = "select kind, subject from found"
# The same as Spark: two threads, 2 GB.
DUCKDB = {"threads": "2", "memory_limit": "2GB"}
FRAMES = (*DAY_TABLES, "check_back", "delivery_retry", "dead_letter", "redelivery")
FRAMES += ("subscription_version", "checkpoint", "producer_group")
# The files of small tables may be missing.
EMPTY = {
    "delivery_retry": "transaction_id varchar, position smallint, subscription_id integer, replay integer, "
    "key varchar, attempts integer, due_at timestamptz",
}
# A time before all days: each redelivery has left a receipt.
ALWAYS = datetime(2000, 1, 1, tzinfo=UTC)
POSTGRES = {"work_mem": "256MB", "maintenance_work_mem": "256MB", "max_parallel_workers_per_gather": "1", "jit": "off"}


@dataclass(frozen=True, slots=True)
class Answer:
    """The findings, as (kind, subject), and the time in seconds."""

    found: Found
    seconds: float


async def by_postgres(
    dsn: str, day: date, seen_at: datetime | None = None, receipts_since: datetime | None = ALWAYS
) -> Answer:
    """Run the script in Postgres, over one connection. `seen_at`: now by default; `receipts_since`: since when a
    redelivery leaves a receipt, None for never."""
    low, high = day_bounds(day)
    times = {"seen_at": seen_at or datetime.now(UTC), "receipts_since": receipts_since or "infinity"}
    names = {table: partition_name(table, day) for table in DAY_TABLES}
    text = (HERE / "spark_rules.sql").read_text()
    script = Template(text).substitute(names, low=low, high=high, sla_s=SLA_S, **times)
    async with connected(dsn) as connection:
        for name, value in POSTGRES.items():
            await connection.execute(f"set {name} = '{value}'")
        began = time.monotonic()
        await connection.execute(script, timeout=1800)
        seconds = time.monotonic() - began
        rows = await connection.fetch(FOUND)
    return Answer(frozenset((row["kind"], row["subject"]) for row in rows), seconds)


def by_duckdb(directory: Path, spill: Path) -> Answer:
    """Run the script in DuckDB over a directory of frames. Data that does not fit in memory goes to `spill`."""
    description = json.loads((directory / "frames.json").read_text())
    with closing(duckdb.connect(config=DUCKDB | {"temp_directory": str(spill)})) as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute("set preserve_insertion_order = false")
        began = time.monotonic()
        for name in FRAMES:
            if (directory / name).is_dir():
                connection.execute(f"create view {name} as select * from read_parquet('{directory}/{name}/*.parquet')")
            else:
                connection.execute(f"create table {name} ({EMPTY[name]})")
        connection.execute("create table rule (name varchar, value double)")
        connection.executemany("insert into rule values (?, ?)", list(description["rules"].items()))
        connection.execute(
            "create table moment as select ?::timestamptz as seen_at, ?::timestamptz - to_seconds(?) as on_time, "
            "?::timestamptz as receipts_since",
            [description["seen_at"], description["seen_at"], SLA_S, description.get("receipts_since")],
        )
        connection.execute((HERE / "spark_rules_duckdb.sql").read_text())
        seconds = time.monotonic() - began
        rows = connection.execute(FOUND).fetchall()
    return Answer(frozenset((kind, subject) for kind, subject in rows), seconds)


def planted_in(file: Path) -> Found:
    """Return the faults that the generator planted."""
    planted: dict[str, list[str]] = json.loads(file.read_text())
    return frozenset((kind, subject) for kind, subjects in planted.items() for subject in subjects)
