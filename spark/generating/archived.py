"""A made day as an archive: the manifest beside its files, and what was changed in them since."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from spark.archive import MANIFEST, files_of
from spark.archive_files import ArchiveFiles
from spark.archive_writing import VERSION
from spark.generating.parquet import write
from spark.generating.plan import Plan
from spark.manifest import TABLES, TableManifest, total

KIND = "archive_differs"
# Its subject is the table, so a day can have no more than one of each; two tables are left as they are. The column is
# one that no other rule judges.
SPOILT = {"op": "decided_at", "receipt": "settled_at", "attempt": "at"}


def finish(spark: SparkSession, directory: Path, plan: Plan) -> None:
    """Write manifest.json over the files that are there, bodies left out. Raises OSError and what Spark raises."""
    files = ArchiveFiles(spark)
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
        "redacted": [],
    }
    files.write_text(f"{place}/{MANIFEST}", json.dumps(described))


def plant(directory: Path) -> dict[str, list[str]]:
    """Change one time of one row by a microsecond in each of some tables; return what is to be found."""
    for table, column in SPOILT.items():
        file = min((directory / table).glob("*.parquet"))
        rows = pq.read_table(file)
        times = rows[column].cast(pa.int64())
        later = pa.chunked_array([pa.array([times[0].as_py() + 1]), *times.slice(1).chunks])
        place = rows.schema.get_field_index(column)
        write(file, rows.set_column(place, rows.schema.field(place), later.cast(rows.schema.field(place).type)))
    return {KIND: list(SPOILT)}
