"""Computes the digest tree of a day from Parquet files, with pyarrow and without Spark.

It shares no code with the proof's own computation but the tree, so that one checks the other. Memory: about 100 bytes
for each row of the largest table.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark.certificate.tree import (
    COLUMNS_OF,
    FINDING,
    FINDINGS,
    NODE_DIGITS,
    Columns,
    buckets,
    leaf,
    node,
    table_of,
)

BATCH_ROWS = 50_000


class NoRowsError(Exception):
    """A directory has no rows of the day, or they cannot be read; the text says why."""


def directory_of(root: Path, day: str) -> Path:
    """Return where a directory has the day's tables or findings: itself, or below it by day and attempt."""
    places = [root, root / day, root / f"day={day}", *sorted((root / f"day={day}").glob("*"))]
    found = [place for place in places if (place / "half").is_dir() or _findings(place, day).is_dir()]
    if len(found) != 1:
        how = "several directories" if found else "no directory"
        raise NoRowsError(f"{root} has {how} with Parquet of {day}; name one with `half`, `op`, `outbox`, `receipt`.")
    return found[0]


def _findings(place: Path, day: str) -> Path:
    return place / "findings" / f"day={day}"


def read_tables(root: Path, body: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables of a certificate, computed from what a directory has: the day's rows, findings, or both."""
    day, before = body["day"], datetime.fromisoformat(body["receipts_before"])
    place = directory_of(root, day)
    made = {}
    try:
        if (place / "half").is_dir():
            for table, columns in COLUMNS_OF[body["format"]].items():
                made[table] = _read(files_of(place, table), table, columns, before)
        if _findings(place, day).is_dir():
            files = sorted(_findings(place, day).glob("*.parquet"))
            made[FINDING] = _read(files, FINDING, FINDINGS, before)
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise NoRowsError(f"{place} cannot be read: {error}") from error
    return made


def files_of(place: Path, table: str) -> list[Path]:
    """Return a table's files: those that an archive's manifest names, or all of them."""
    manifest = place / "manifest.json"
    if manifest.exists():
        return [place / file["path"] for file in json.loads(manifest.read_text())["tables"][table]["files"]]
    return sorted((place / table).glob("*.parquet"))


def _read(files: list[Path], table: str, columns: Columns, before: datetime) -> dict[str, Any]:
    leaves: dict[str, list[str]] = {}
    for file in files:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(BATCH_ROWS, columns=_named(table, columns)):
                for prefix, one in _leaves(batch, table, columns, before):
                    leaves.setdefault(prefix, []).append(one)
    nodes = {prefix: node(below) for prefix, below in leaves.items()}
    return table_of(nodes if table == FINDING else buckets(nodes))


def _named(table: str, columns: Columns) -> list[str]:
    return [name for name, _ in columns]


def _leaves(batch: Any, table: str, columns: Columns, before: datetime) -> Iterator[tuple[str, str]]:
    if table == "receipt":
        # Later receipts are legal: redeliveries and replays.
        settled = pc.cast(batch.column("settled_at"), pa.timestamp("us", "UTC"))
        batch = batch.filter(pc.less(settled, pa.scalar(before, pa.timestamp("us", "UTC"))))
    lists = [_values(batch.column(name), kind) for name, kind in columns]
    if table == "half":
        # The proof reads a policy at position 0 only; other positions have none.
        lists[-1] = [policy if at == 0 else None for at, policy in zip(lists[1], lists[-1], strict=True)]
    for values in zip(*lists, strict=True):
        prefix = values[0] if table == FINDING else values[0][:NODE_DIGITS]
        yield prefix, leaf(table, columns, values)


def _values(column: Any, kind: str) -> list[Any]:
    if kind == "time":
        column = pc.cast(pc.cast(column, pa.timestamp("us", "UTC")), pa.int64())
    values: list[Any] = column.to_pylist()
    return values
