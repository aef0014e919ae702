"""Searches the files of a day, range by range, several ranges at a time, in this process.

Arrow and numpy compute most of it without Python's lock, so threads use several cores.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.types import StructType

from spark.errors import RunFailedError
from spark.schemas import ALSO, ARCHIVE, BIG, OF_DAY
from spark.transforms.day_counts import DayCounts, total
from spark.transforms.screen import by_name
from spark.transforms.screen.compared import COMPARISONS
from spark.transforms.screen.counts import counts_of
from spark.transforms.screen.log_order import disorder, write_spans
from spark.transforms.screen.numbered import Flags, Numbered, numbered
from spark.transforms.screen.row_groups import RowGroup, ranges_of, read_range, row_groups
from spark.transforms.screen.suspects import Known, judge

SCHEMAS = BIG | OF_DAY | {"archive": ARCHIVE}
# With the columns that only comparisons need.
READ = SCHEMAS | {name: StructType([*SCHEMAS[name].fields, *also.fields]) for name, also in ALSO.items()}
# Besides the tables' names, the directories below a search's place: the suspects' ids, the log's disorder, and what is
# counted by name of all other transactions.
SUSPECT, DISORDER, REFUSED, UNTAKEN = "suspect", "disorder", "refused", "untaken"


@dataclass(frozen=True)
class Searched:
    """What a search found. `place`: below it are the suspects' rows, by table; a table without any has no directory.
    `disordered`: how many places of the log are out of order, and of them `doubled`, at the offset before. `among`: the
    ids, sorted, of the transactions that a comparison must look at, by its name (spark/transforms/screen/compared.py).
    """

    place: Path
    suspects: int
    counts: DayCounts
    last_offset: int | None
    disordered: int = 0
    doubled: int = 0
    among: Mapping[str, np.ndarray] = field(default_factory=dict)


def search_files(files: Mapping[str, Sequence[str]], known: Known, place: Path, abreast: int) -> Searched:
    """Search the files of the tables for suspect transactions, and count the figures. Raises ArrowException, OSError.

    `abreast`: how many ranges are searched, and in memory, at a time.
    """
    groups = {name: row_groups(files.get(name, ())) for name in SCHEMAS if name != "archive" or name in files}
    ranges = ranges_of(groups)
    spans = place / "spans"
    spans.mkdir(parents=True)
    work = [partial(_search_range, groups, known, place, number, *ids) for number, ids in enumerate(ranges)]
    found = _at_once(work, abreast)
    (place / DISORDER).mkdir()
    disordered = doubled = 0
    for number, table in enumerate(disorder(spans)):
        disordered += table.num_rows
        doubled += pc.sum(pc.equal(table["offset"], table["before_offset"])).as_py()
        pq.write_table(table, place / DISORDER / f"part-{number:05}.parquet")
    offsets = [one.last_offset for one in found if one.last_offset is not None]
    return Searched(
        place,
        sum(one.suspects for one in found),
        total([one.counts for one in found]),
        max(offsets, default=None),
        disordered,
        doubled,
        {name: np.sort(np.concatenate([one.among[name] for one in found])) for name in found[0].among},
    )


def _at_once(work: Sequence[Callable[[], Searched]], abreast: int) -> list[Searched]:
    pool = ThreadPoolExecutor(abreast)
    try:
        return [running.result() for running in [pool.submit(part) for part in work]]
    finally:
        # A range that still runs writes below a directory that may be removed next.
        pool.shutdown(cancel_futures=True)


def _search_range(
    groups: Mapping[str, Sequence[RowGroup]], known: Known, place: Path, number: int, low: str, high: str
) -> Searched:
    by = known.compared
    if by is not None and by.ended.is_set():
        raise RunFailedError("The read of the day was ended.")
    schemas = SCHEMAS if by is None else READ
    rows = {name: read_range(of_table, low, high, schemas[name]) for name, of_table in groups.items()}
    here = replace(known, named=_within(known.named, low, high))
    n = numbered(rows)
    judged = judge(n, here)
    suspect = judged.suspect
    write_spans(rows["outbox"], place / "spans", number)
    for name, table in rows.items():
        _write(place / name, number, table.filter(pa.array(suspect[n.of[name]])))
    _write(place / REFUSED, number, by_name.refused(n, judged))
    _write(place / UNTAKEN, number, by_name.untaken(n, judged))
    # A ledger's transaction may have no other row.
    ids = np.union1d(np.asarray(n.ids.filter(pa.array(suspect))).astype("S"), here.named)
    _write(place / SUSPECT, number, pa.table({"transaction_id": pa.array(ids.astype(str), pa.string())}))
    last = pc.max(rows["outbox"]["offset"]).as_py()
    among = {} if by is None else {name: _ids_of(n, looked(n, by)) for name, looked in COMPARISONS.items()}
    return Searched(place, len(ids), counts_of(n, known.day), last, among=among)


def _ids_of(n: Numbered, transactions: Flags) -> np.ndarray:
    return np.asarray(n.ids.filter(pa.array(transactions))).astype("S36")


def _within(ids: np.ndarray, low: str, high: str) -> np.ndarray:
    first, end = np.searchsorted(ids, np.array([low, high], dtype="S"))
    return ids[first:end]


def _write(directory: Path, number: int, rows: pa.Table) -> None:
    if rows.num_rows:
        directory.mkdir(exist_ok=True)
        # Spark's reader of LZ4 refuses some pages that pyarrow writes: "all input must be consumed".
        pq.write_table(rows, directory / f"part-{number:05}.parquet", compression="snappy")


def ids_in(files: Sequence[str]) -> np.ndarray:
    """Return the transactions' ids in files, sorted."""
    ids = [pq.read_table(file, columns=["transaction_id"])["transaction_id"].combine_chunks() for file in files]
    return np.unique(np.concatenate([np.zeros(0, "S36"), *(np.asarray(one).astype("S") for one in ids)]))
