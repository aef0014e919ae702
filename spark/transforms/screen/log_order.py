"""Finds the places of the log that are out of order, in a day that is read in ranges of ids.

A transaction that was decided late has offsets far from those of its neighbors by id, so each range writes its offsets
to files by span of offsets, and each span is sorted by itself. Memory is that of one span.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark.transforms.screen.numbered import Ints, ints

SPAN = 1 << 20
COLUMNS = ("offset", "committed_at", "before_offset", "before_at")


def write_spans(outbox: pa.Table, place: Path, number: int, span: int | None = None) -> None:
    """Write a range's offsets and commit times. `number`: of the range; `span`: SPAN by default."""
    offset, at = ints(outbox["offset"]), ints(outbox["committed_at"])
    order = np.argsort(offset, kind="stable")
    rows = np.stack([offset[order], at[order]])
    of = rows[0] // (span or SPAN)
    for one in np.unique(of):
        np.save(place / f"{one:019}-{number:06}.npy", rows[:, of == one])


def disorder(place: Path) -> Iterator[pa.Table]:
    """Return what spark/transforms/offsets.py:disorder does (COLUMNS), from the files of `write_spans`."""
    files: dict[str, list[Path]] = {}
    for file in sorted(place.iterdir()):
        files.setdefault(file.name.partition("-")[0], []).append(file)
    last: Ints = np.zeros((2, 0), np.int64)
    for parts in files.values():
        rows = np.concatenate([np.load(part) for part in parts], axis=1)
        rows = np.concatenate([last, rows[:, np.lexsort(rows[::-1])]], axis=1)
        last = rows[:, -1:]
        found = _disordered(rows)
        if found.shape[1]:
            yield _table(found)


def _disordered(rows: Ints) -> Ints:
    before, after = rows[:, :-1], rows[:, 1:]
    wrong: npt.NDArray[np.bool_] = (after[0] <= before[0]) | (after[1] < before[1])
    return np.concatenate([after[:, wrong], before[:, wrong]])


def _table(found: Ints) -> pa.Table:
    time = pa.timestamp("us", tz="UTC")
    offset, at, before_offset, before_at = (pa.array(column) for column in found)
    return pa.table(dict(zip(COLUMNS, (offset, at.cast(time), before_offset, before_at.cast(time)), strict=True)))
