"""Turn a generated day into an archive: write the manifest beside its files, and plant changes in them."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark.archive.layout import MANIFEST, beside_of, files_of
from spark.archive.writer import VERSION
from spark.engine.filesystem import files_for
from spark.manifest import TABLES, TableManifest, total
from spark.synthetic.parquet import write
from spark.synthetic.plan import Plan

KIND = "archive_differs"
# The subject of this finding is the table, so a day can have at most one per table; two tables stay unchanged. No other
# rule uses the changed column.
DAMAGED = {"op": "decided_at", "receipt": "settled_at", "attempt": "at"}


def finish(spark: SparkSession, directory: Path, plan: Plan) -> None:
    """Write manifest.json for the existing files, without bodies. Raises OSError and Spark's errors."""
    files = files_for(spark)
    place = files.qualified(str(directory.resolve()))
    tables = {}
    for table in TABLES:
        listed = files_of(spark, files, place, table)
        tables[table] = asdict(total(TableManifest.of(file) for file in listed)) | {"files": listed}
    described = {
        "version": VERSION,
        "day": plan.day.isoformat(),
        "seen_at": plan.seen_at.isoformat(),
        "written_at": datetime.now(UTC).isoformat(),
        "bodies": False,
        "largest_body": 0,
        "tables": tables,
        "beside": beside_of(files, place),
        "redacted": [],
    }
    files.write_text(f"{place}/{MANIFEST}", json.dumps(described))


def plant(directory: Path) -> dict[str, list[str]]:
    """Change one time in one row of some tables by a microsecond; return the expected findings.

    The manifest gets the changed files' bytes, so the files are as written, and their rows differ from its digests.
    """
    described = json.loads((directory / MANIFEST).read_text())
    for table, column in DAMAGED.items():
        file = min((directory / table).glob("*.parquet"))
        rows = pq.read_table(file)
        times = rows[column].cast(pa.int64())
        later = pa.chunked_array([pa.array([times[0].as_py() + 1]), *times.slice(1).chunks])
        place = rows.schema.get_field_index(column)
        write(file, rows.set_column(place, rows.schema.field(place), later.cast(rows.schema.field(place).type)))
        (listed,) = (one for one in described["tables"][table]["files"] if one["path"] == f"{table}/{file.name}")
        content = file.read_bytes()
        listed |= {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    (directory / MANIFEST).write_text(json.dumps(described))
    return {KIND: list(DAMAGED)}
