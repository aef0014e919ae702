"""The rows of one range of ids, with numbers in place of ids, so that arrays take the place of joins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
# Tables with a row for each message or more; the others have rows of transactions.
OF_MESSAGES = ("half", "outbox", "receipt", "archive", "delivery_retry", "dead_letter", "redelivery")


@dataclass(frozen=True, slots=True)
class Numbered:
    """`ids`: of the transactions, by number. `of`: the number of each row's transaction, by table. Messages are
    numbered transaction by transaction, from position 0 to the highest of any row: `first` has the number of each
    transaction's first message, and one more at the end. `message`: the number of each row's message, by table."""

    rows: Mapping[str, pa.Table]
    ids: pa.Array
    of: Mapping[str, Ints]
    first: Ints
    message: Mapping[str, Ints]

    @property
    def messages(self) -> int:
        """How many numbers of messages there are."""
        return int(self.first[-1])

    def any_of(self, messages: Flags) -> Flags:
        """Return for each transaction whether any of its messages has a flag."""
        return self.count_of(messages) > 0

    def count_of(self, messages: Flags) -> Ints:
        """Return for each transaction how many of its messages have a flag."""
        total = np.concatenate([[0], np.cumsum(messages, dtype=np.int64)])
        return np.asarray(total[self.first[1:]] - total[self.first[:-1]])


def numbered(rows: Mapping[str, pa.Table]) -> Numbered:
    """Number the transactions and messages of a range's tables."""
    columns = [table["transaction_id"] for table in rows.values()]
    every = pa.chunked_array([chunk for column in columns for chunk in column.chunks], pa.string())
    encoded = every.combine_chunks().dictionary_encode()
    codes = np.asarray(encoded.indices).astype(np.int64)
    places = np.cumsum([0, *(len(column) for column in columns)])
    of = {name: codes[places[at] : places[at + 1]] for at, name in enumerate(rows)}
    # A position below 0 cannot be stored; it counts as 0 here.
    positions = {name: np.maximum(ints(rows[name]["position"]), 0) for name in OF_MESSAGES if name in rows}
    highest = np.zeros(len(encoded.dictionary), np.int64)
    for name, position in positions.items():
        np.maximum.at(highest, of[name], position)
    first = np.concatenate([[0], np.cumsum(highest + 1)])
    message = {name: first[of[name]] + position for name, position in positions.items()}
    return Numbered(rows, encoded.dictionary, of, first, message)


def ints(column: pa.ChunkedArray, missing: int = 0) -> Ints:
    """Return a column of whole numbers, or of times as microseconds since 1970."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if column.null_count:
        column = column.fill_null(missing)
    return np.asarray(column.to_numpy(), dtype=np.int64)


def codes(column: pa.ChunkedArray) -> tuple[Ints, list[Any]]:
    """Return a column as places in the list of its distinct values; a null is one of them."""
    encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices).astype(np.int64), encoded.dictionary.to_pylist()


def equal(column: pa.ChunkedArray, value: str) -> Flags:
    """Return where a column of texts has a value."""
    of, values = codes(column)
    wanted = np.array([one == value for one in values], dtype=np.bool_)
    return wanted[of] if len(values) else np.zeros(len(of), np.bool_)
