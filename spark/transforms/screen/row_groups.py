"""Divides a day's Parquet files into ranges of ids by the statistics of their row groups, and reads one range.

Any layout is read correctly. Each row group is read once or twice if it has ids of one short time, as those of the
proof's own reads, the archive and the generator do; one that spans several ranges is read for each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import StructType

ID = "transaction_id"
# About so many rows of all tables are in memory for each range.
ROWS_AT_ONCE = 1_000_000
SAMPLE_OF = 1000
# Below and above every id: ids are hexadecimal digits and hyphens.
LOWEST, HIGHEST = "", "~"


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file, with its lowest and highest id."""

    file: str
    number: int
    rows: int
    low: str
    high: str


def row_groups(files: Sequence[str]) -> list[RowGroup]:
    """Return the row groups of Parquet files; one without statistics may have any id."""
    found = []
    for file in files:
        metadata = pq.read_metadata(file)
        at = metadata.schema.names.index(ID)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            column = group.column(at)
            known = column.statistics if column.is_stats_set else None
            low, high = (known.min, known.max) if known is not None and known.has_min_max else (LOWEST, HIGHEST)
            if group.num_rows:
                found.append(RowGroup(file, number, group.num_rows, low, high))
    return found


def ranges_of(groups: Mapping[str, Sequence[RowGroup]]) -> list[tuple[str, str]]:
    """Return half-open ranges of ids, which cover all ids and have about ROWS_AT_ONCE rows each.

    `groups`: by table. The borders are ids of the largest table: the first ones of its files, if these divide it; else
    each SAMPLE_OF-th id is looked at.
    """
    total = sum(group.rows for of_table in groups.values() for group in of_table)
    largest = max(groups.values(), key=lambda of_table: sum(group.rows for group in of_table))
    parts = max(1, total // ROWS_AT_ONCE)
    if parts == 1:
        return [(LOWEST, HIGHEST)]
    by_files = _ranges(_borders([(file.low, file.rows) for file in _files(largest)], parts))
    if _divide(by_files, largest, parts):
        return by_files
    return _ranges(_borders([(one, 1) for one in _sample(largest)], parts))


def _ranges(borders: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip([LOWEST, *borders], [*borders, HIGHEST], strict=True))


def _borders(ids: Sequence[tuple[str, int]], parts: int) -> list[str]:
    """Return which of the ids divide the rows best into parts. Each is given with the number of rows from it on."""
    ids = sorted(ids)
    before = np.cumsum([0, *(rows for _, rows in ids)])
    places = [np.abs(before[:-1] - before[-1] * part / parts).argmin() for part in range(1, parts)]
    return sorted({ids[place][0] for place in places})


def _files(groups: Sequence[RowGroup]) -> list[RowGroup]:
    """Return each file as one row group. The files of all tables begin at the same ids, as a rule."""
    by_file: dict[str, list[RowGroup]] = {}
    for group in groups:
        by_file.setdefault(group.file, []).append(group)
    return [
        RowGroup(file, 0, sum(one.rows for one in of_file), min(g.low for g in of_file), max(g.high for g in of_file))
        for file, of_file in by_file.items()
    ]


def _divide(ranges: Sequence[tuple[str, str]], groups: Sequence[RowGroup], parts: int) -> bool:
    """Return whether no range reads more than twice its share of the rows: files are small, and hardly overlap."""
    most = 2 * sum(group.rows for group in groups) / parts
    return all(
        sum(group.rows for group in groups if group.high >= low and group.low < high) <= most for low, high in ranges
    )


def _sample(groups: Sequence[RowGroup]) -> list[str]:
    found: list[str] = []
    for group in groups:
        with pq.ParquetFile(group.file) as file:
            ids = file.read_row_group(group.number, columns=[ID], use_threads=False)[ID]
        found += ids.take(pa.array(range(0, len(ids), SAMPLE_OF))).to_pylist()
    return sorted(found)


def read_range(groups: Sequence[RowGroup], low: str, high: str, schema: StructType) -> pa.Table:
    """Return the rows with ids from `low` to below `high`, in the columns of a schema; a missing column is null."""
    parts = []
    for group in groups:
        if group.high < low or group.low >= high:
            continue
        with pq.ParquetFile(group.file, coerce_int96_timestamp_unit="us") as file:
            there = [name for name in schema.names if name in file.schema_arrow.names]
            part = file.read_row_group(group.number, columns=there, use_threads=False)
        if group.low < low or group.high >= high:
            ids = part[ID]
            part = part.filter(pc.and_(pc.greater_equal(ids, low), pc.less(ids, high)))
        parts.append(_in(part, schema))
    return pa.concat_tables(parts) if parts else arrow_schema(schema).empty_table()


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of a frame's schema."""
    return pa.schema([(field.name, to_arrow_type(field.dataType, timezone="UTC")) for field in schema.fields])


def _in(part: pa.Table, schema: StructType) -> pa.Table:
    columns: Mapping[str, pa.DataType] = dict(zip(schema.names, arrow_schema(schema).types, strict=True))
    given = [
        part[name].cast(kind) if name in part.column_names else pa.nulls(part.num_rows, kind)
        for name, kind in columns.items()
    ]
    return pa.table(given, names=list(columns))
