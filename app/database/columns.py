"""Generate column lists, parameter arrays and select lists from one declaration, so that no code counts positions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# The source of a column that holds the number, from 0, of an inner row in its row.
NUMBER = "#"
# From so many rows on a column of nulls is left out: below, looking for it takes as long as passing it.
ROWS_LEAST = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column of rows that a statement takes as parameters.

    `kind` is the SQL type of one value. `source` is the attribute of a row that holds it, dotted for an attribute of an
    attribute; it is the column's name by default. With `given` the caller passes the values itself. With `first_only`
    only the first inner row of a row has the value; the others have null.
    """

    name: str
    kind: str
    source: str = ""
    given: bool = False
    first_only: bool = False

    @property
    def read_from(self) -> str:
        """The attribute of a row that holds the value."""
        return self.source or self.name


class Parameters:
    """One row that a statement takes as one parameter for each column, from parameter `first` on.

    The statement names a parameter by its column. `next` is the number of the parameter after the last column. Columns
    that are `given` come before the others.
    """

    def __init__(self, *columns: Column, first: int = 1) -> None:
        self.names = [column.name for column in columns]
        self.types = [column.kind for column in columns]
        self.next = first + len(columns)
        self._sql = {column.name: f"${number}::{column.kind}" for number, column in enumerate(columns, first)}
        self._given, read = _given_and_read(columns)
        self._read: Callable[[Any], tuple[Any, ...]] = eval(  # noqa: S307 -- columns of ours
            f"lambda row: ({''.join(f'row.{column.read_from}, ' for column in read)})"
        )

    def __getitem__(self, name: str) -> str:
        return self._sql[name]

    def arguments(self, row: Any, **given: Any) -> list[Any]:
        """Return the arguments for `row`; `given` has the values that the row does not hold, by column."""
        return [*(given[name] for name in self._given), *self._read(row)]


class RowArrays:
    """Rows that a statement takes as one array parameter for each column.

    The statement's `unnest` and the arguments come from the same columns, so they always agree. `first` is the number
    of the first array's parameter, `next` the number of the parameter after the last array. Columns that are `given`
    come before the others.

    With `each`, every row has inner rows in its attribute of that name. The arrays then have one element for each inner
    row. A source that begins with `each` and a dot is an attribute of the inner row; NUMBER is its number.

    `arrays(rows, **given)` returns the arguments; `given` has the arrays that the rows do not hold, by column. Of many
    rows, a column that is null in all of them is an empty array: `unnest` fills it up with nulls.
    """

    def __init__(self, *columns: Column, first: int = 1, each: str = "") -> None:
        self.first, self.next = first, first + len(columns)
        self.names = [column.name for column in columns]
        self.types = [f"{column.kind}[]" for column in columns]
        self.arrays = _arrays(columns, each)

    def unnest(self, alias: str, *, ordinality: str | None = None) -> str:
        """Return the item of a FROM clause that turns the arrays into rows; `ordinality` names a row number from 1."""
        arrays = ", ".join(f"${number}::{kind}" for number, kind in enumerate(self.types, self.first))
        names = listed([*self.names, *([ordinality] if ordinality else [])])
        return f"unnest({arrays}){' with ordinality' if ordinality else ''} as {alias}({names})"


def _given_and_read(columns: Sequence[Column]) -> tuple[list[str], list[Column]]:
    given = [column.name for column in columns if column.given]
    assert [column.name for column in columns[: len(given)]] == given, "given columns come first"
    return given, [column for column in columns if not column.given]


def _arrays(columns: Sequence[Column], each: str) -> Callable[..., list[Sequence[Any]]]:
    """Return a function from rows, and the given arrays by name, to an array for each column.

    It is compiled, as a dataclass's `__init__` is: `attrgetter` takes twice the time, and a relay settles thousands of
    rows a second. Arrays are built one by one if all values are attributes of a row. Otherwise a tuple is built for
    each row and the tuples are transposed, because a loop for each array would look up the inner object every time.
    """
    given, read = _given_and_read(columns)
    if not each and not any("." in column.read_from for column in read):
        arrays = "".join(f"[row.{column.read_from} for row in rows], " for column in read)
    else:
        arrays = f"*(zip(*{_tuples(read, each)}, strict=True) if rows else [()] * {len(read)})"
    first = "".join(f"{name}, " for name in given)
    compiled: Callable[..., list[Sequence[Any]]] = eval(  # noqa: S307 -- columns of ours
        f"lambda rows, {'*, ' if given else ''}{first}: [{first}*without_nulls([{arrays}])]",
        {"without_nulls": _without_nulls},
    )
    return compiled


def _without_nulls(arrays: list[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the arrays with an empty one in place of each that has nulls alone."""
    count = len(arrays[0])
    if count < ROWS_LEAST:
        return arrays
    return [() if array[0] is None and array.count(None) == count else array for array in arrays]


def _tuples(columns: Sequence[Column], each: str) -> str:
    """Return the expression of a list with a tuple of values for each row, or for each inner row."""
    owners = sorted({column.read_from.rpartition(".")[0] for column in columns} - {"", each})
    names = {owner: f"part{number}" for number, owner in enumerate(owners)} | {each: "inner", "": "row"}
    loops = "".join(f" for {names[owner]} in (row.{owner},)" for owner in owners)
    if each:
        loops += f" for number, inner in enumerate(row.{each})"
    values = ""
    for column in columns:
        owner, _, name = column.read_from.rpartition(".")
        value = "number" if name == NUMBER else f"{names[owner]}.{name}"
        values += f"None if number else {value}, " if column.first_only else f"{value}, "
    return f"[({values}) for row in rows{loops}]"


def field_names(shape: type) -> tuple[str, ...]:
    """Return the names of a dataclass's fields, in order."""
    return tuple(field.name for field in fields(shape))


def listed(names: Iterable[str]) -> str:
    """Return quoted column names, separated by commas."""
    return ", ".join(f'"{name}"' for name in names)


def same(*names: str, of: str | None = None) -> dict[str, str]:
    """Return columns that take the value of the column with the same name, `of` a table or alias."""
    prefix = f"{of}." if of else ""
    return {name: f'{prefix}"{name}"' for name in names}


def selected(values: Mapping[str, str]) -> str:
    """Return a select list: each expression under its column's name."""
    return ", ".join(f'{expression} as "{name}"' for name, expression in values.items())


def insert(table: str, values: Mapping[str, str], rest: str) -> str:
    """Return `insert into … select …` with both lists from one mapping of columns; `rest` begins with FROM."""
    return f"insert into {table} ({listed(values)}) select {', '.join(values.values())} {rest}"
