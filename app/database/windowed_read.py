"""Reads a list one window of rows at a time, for a limited time."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

Row = TypeVar("Row")
Place = TypeVar("Place")


@dataclass(frozen=True, slots=True)
class ListWindow(Generic[Row, Place]):
    """Rows of a list, and the place below which the next window begins (None: no rows are left)."""

    rows: list[Row]
    below: Place | None


async def read_windows(
    read_window: Callable[[Place, int], Awaitable[ListWindow[Row, Place]]], highest: Place, limit: int, scan_s: float
) -> ListWindow[Row, Place]:
    """Return up to `limit` + 1 rows below `highest`. The row above `limit` shows that there is a next page.

    `read_window(below, at_most)` returns up to `at_most` rows of the window below a place. At least one window is read;
    after `scan_s` seconds no other window is begun.
    """
    rows: list[Row] = []
    until = monotonic() + scan_s
    below: Place | None = highest
    while below is not None and len(rows) <= limit and (below == highest or monotonic() < until):
        window = await read_window(below, limit + 1 - len(rows))
        rows += window.rows
        below = window.below
    return ListWindow(rows, below)


async def count_windows(
    count_window: Callable[[Place, int], Awaitable[tuple[int, Place | None]]], highest: Place, most: int, scan_s: float
) -> tuple[int, bool]:
    """Return how many rows match below `highest`, up to `most`, and whether these are all.

    `count_window(below, at_most)` returns how many match in the window below a place, up to `at_most`, and the place
    below which the next window begins (None: no rows are left). At least one window is counted; after `scan_s` seconds
    no other window is begun.
    """
    count, until = 0, monotonic() + scan_s
    below: Place | None = highest
    while below is not None and count <= most and (below == highest or monotonic() < until):
        found, below = await count_window(below, most + 1 - count)
        count += found
    return min(count, most), below is None and count <= most
