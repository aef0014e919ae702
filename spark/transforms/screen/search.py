"""Searches a day for suspect transactions in its files on this machine, and returns their rows as frames."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import ArrowException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from spark import schemas
from spark.engine.session import cores
from spark.errors import RunFailedError
from spark.frames import Frames, empty
from spark.transforms.day_counts import DayCounts
from spark.transforms.ledger_suspects import by_ledgers
from spark.transforms.screen.compared import Compared
from spark.transforms.screen.day_files import (
    DISORDER,
    REFUSED,
    SCHEMAS,
    SUSPECT,
    UNTAKEN,
    Searched,
    ids_in,
    search_files,
)
from spark.transforms.screen.subscribers import Takers, subscribers_of
from spark.transforms.screen.suspects import Known

T = TypeVar("T")

_ID = StructType([StructField("transaction_id", StringType())])
_PLACE = StructType(
    [
        StructField(name, kind)
        for prefix in ("", "before_")
        for name, kind in ((f"{prefix}offset", LongType()), (f"{prefix or 'committed_'}at", TimestampType()))
    ]
)

# Up to this many places of the log are in one partition.
FEW_PLACES = 100_000


@dataclass(frozen=True)
class SearchedDay:
    """`few`: the suspects' rows; `suspects`: how many there are; `disorder`: the places of the log out of order;
    `doubled`: whether an offset of the day is there more than once. `refused` and `untaken`: of all other transactions;
    None if there are none."""

    few: Frames
    suspects: int
    counts: DayCounts
    disorder: DataFrame
    doubled: bool
    last_offset: int | None
    refused: DataFrame | None
    untaken: DataFrame | None


def can_search(f: Frames) -> bool:
    """Return whether all rows of the day's own tables are in files that this process reads."""
    return f.files is not None and (f.archive is None or "archive" in f.files)


def search(f: Frames, sla_s: float, place: Path, compared: Compared | None = None) -> Searched:
    """Search the files of the day; `f` has its routes. Files are written below `place`. Raises RunFailedError.

    `compared`: what the comparisons in Postgres know, if they wait for the search.
    """
    assert f.files is not None
    assert f.routes is not None
    subscribers, files = subscribers_of(f.routes), f.files
    known = Known(
        day=f.day,
        subscribers=subscribers,
        takers=Takers(subscribers),
        due_by=_due_by(f, sla_s),
        fewest_checks=_reading(lambda: _fewest_checks(f)),
        receipts_since=None if f.receipts_since is None else _micros(f.receipts_since),
        named=_named(f, place),
        compared=compared,
    )
    abreast = cores(f.op.sparkSession)
    return _reading(lambda: search_files(files, known, place / "search", abreast))


def searched_day(f: Frames, found: Searched) -> SearchedDay:
    """Return what was found as frames, beside those of the day."""
    order = _read(f, found, DISORDER, _PLACE)
    order = order.coalesce(1) if found.disordered <= FEW_PLACES else order
    return SearchedDay(
        few=_few(f, found),
        suspects=found.suspects,
        counts=found.counts,
        disorder=order,
        doubled=found.doubled > 0,
        last_offset=found.last_offset,
        refused=_read_any(f, found, REFUSED, schemas.REFUSED),
        untaken=_read_any(f, found, UNTAKEN, schemas.UNTAKEN),
    )


def _due_by(f: Frames, sla_s: float) -> int:
    return _micros(f.seen_at - timedelta(seconds=sla_s))


def _micros(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _fewest_checks(f: Frames) -> float:
    assert f.files is not None
    files = f.files.get("producer_group", ())
    of_groups = [pc.min(pq.read_table(file, columns=["max_checks"])["max_checks"]).as_py() for file in files]
    return min([float(f.rules["max_checks"]), *(float(n) for n in of_groups if n is not None)])


def _named(f: Frames, place: Path) -> np.ndarray:
    """Return the ids, sorted, of transactions on which a ledger may disagree."""
    if disputed := by_ledgers(f, F.col("transaction_id")):
        ids = reduce(DataFrame.unionByName, disputed).distinct().withColumnRenamed("suspect", "transaction_id")
        ids.write.parquet(str(place / "disputed"))
    return _reading(lambda: ids_in([str(file) for file in (place / "disputed").glob("*.parquet")]))


def _few(f: Frames, found: Searched) -> Frames:
    """Return the suspects' rows."""
    names = [name for name in SCHEMAS if getattr(f, name) is not None]
    theirs: dict[str, Any] = {name: _read(f, found, name, SCHEMAS[name]) for name in names}
    suspect = _read(f, found, SUSPECT, _ID)
    for name in ("producer_ledger", "consumer_ledger"):
        if (ledger := getattr(f, name)) is not None:
            theirs[name] = ledger.join(suspect, "transaction_id", "left_semi")
    return replace(f, **theirs)


def _read(f: Frames, found: Searched, name: str, schema: StructType) -> DataFrame:
    rows = _read_any(f, found, name, schema)
    return empty(f.op.sparkSession, schema) if rows is None else rows


def _read_any(f: Frames, found: Searched, name: str, schema: StructType) -> DataFrame | None:
    place = found.place / name
    if not place.exists() or not any(place.iterdir()):
        return None
    return f.op.sparkSession.read.schema(schema).parquet(f"file:{place}")


def _reading(read: Callable[[], T]) -> T:
    try:
        return read()
    except (ArrowException, OSError) as error:
        raise RunFailedError(f"The rows that were read cannot be searched: {error}") from error
