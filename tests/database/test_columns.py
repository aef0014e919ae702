"""Columns that a statement takes as arrays: the `unnest`, the arguments and the column lists agree."""

from dataclasses import dataclass
from types import SimpleNamespace

import asyncpg
import pytest

from app.database.columns import NUMBER, ROWS_LEAST, Column, Parameters, RowArrays, field_names, insert, same, selected
from app.database.connection import Connection
from app.store.relay.log import Outgoing
from app.store.relay.results import FIRST_TRIES, OUTCOMES, STREAMS


@dataclass
class Part:
    offset: int


@dataclass
class Row:
    name: str
    part: Part


@dataclass
class Whole:
    name: str
    parts: list[Part]
    about: Part


ROWS = [Row("a", Part(1)), Row("b", Part(2))]
COLUMNS = RowArrays(
    Column("n", "int", given=True), Column("offset", "bigint", "part.offset"), Column("name", "text"), first=3
)


def test_unnest_and_arguments_come_from_the_same_columns() -> None:
    assert COLUMNS.unnest("a") == 'unnest($3::int[], $4::bigint[], $5::text[]) as a("n", "offset", "name")'
    assert COLUMNS.unnest("a", ordinality="i").endswith(' with ordinality as a("n", "offset", "name", "i")')
    assert COLUMNS.next == 6
    assert COLUMNS.arrays(ROWS, n=[7, 8]) == [[7, 8], (1, 2), ("a", "b")]


def test_no_rows_are_empty_arrays() -> None:
    assert COLUMNS.arrays([], n=[]) == [[], (), ()]


def test_a_lone_column_is_an_array_of_its_values() -> None:
    assert RowArrays(Column("name", "text")).arrays(ROWS) == [["a", "b"]]


def test_inner_rows_repeat_their_row_and_only_the_first_has_what_belongs_to_it_alone() -> None:
    columns = RowArrays(
        Column("name", "text"),
        Column("position", "int", NUMBER),
        Column("offset", "bigint", "parts.offset"),
        Column("about", "bigint", "about.offset", first_only=True),
        each="parts",
    )
    rows = [Whole("a", [Part(1), Part(2)], Part(7)), Whole("b", [], Part(8)), Whole("c", [Part(3)], Part(9))]
    assert columns.arrays(rows) == [("a", "a", "c"), (0, 1, 0), (1, 2, 3), (7, None, 9)]
    assert columns.arrays([]) == [(), (), (), ()]
    assert columns.unnest("a").startswith("unnest($1::text[], $2::int[], $3::bigint[], $4::bigint[])")


def test_a_parameter_is_named_by_its_column() -> None:
    row = Parameters(Column("n", "int", given=True), Column("offset", "bigint", "part.offset"), Column("name", "text"))
    assert [row[name] for name in row.names] == ["$1::int", "$2::bigint", "$3::text"]
    assert (row.types, row.next) == (["int", "bigint", "text"], 4)
    assert row.arguments(ROWS[1], n=7) == [7, 2, "b"]


def test_both_lists_of_an_insert_come_from_one_mapping() -> None:
    values = same("name", "offset", of="a") | {"kind": "'x'"}
    assert insert("t", values, "from a") == (
        'insert into t ("name", "offset", "kind") select a."name", a."offset", \'x\' from a'
    )
    assert selected(values) == 'a."name" as "name", a."offset" as "offset", \'x\' as "kind"'


def test_the_settle_has_a_parameter_for_each_column() -> None:
    assert (STREAMS.first, FIRST_TRIES.first, OUTCOMES.first) == (3, STREAMS.next, FIRST_TRIES.next)
    assert set(FIRST_TRIES.names) < set(OUTCOMES.names)
    assert {"transaction_id", "position", "offset", "topic", "key", "claim"} <= set(field_names(Outgoing))


@pytest.mark.parametrize("count", [1, ROWS_LEAST - 1, ROWS_LEAST, 100])
async def test_a_column_of_nulls_is_filled_up_by_the_server(db: Connection, count: int) -> None:
    columns = RowArrays(
        Column("id", "int"), Column("never", "text"), Column("at_times", "text"), Column("last", "text")
    )
    rows = [SimpleNamespace(id=n, never=None, at_times="a" if n % 2 else None, last=None) for n in range(count)]
    arrays = columns.arrays(rows)
    assert len(arrays[1]) == len(arrays[3]) == (0 if count >= ROWS_LEAST else count)
    found = await db.fetch(f"select * from {columns.unnest('a')}", *arrays)
    assert [tuple(row) for row in found] == [(one.id, None, one.at_times, None) for one in rows]


async def test_lists_and_tuples_are_arrays_and_nothing_else(db: Connection) -> None:
    for array in ([1, None, 3], (1, None, 3)):
        assert await db.fetchval("select $1::int[]", array) == [1, None, 3]
    assert await db.fetchval("select $1::text[]", [["a", "b"], ["c", None]]) == [["a", "b"], ["c", None]]
    with pytest.raises(asyncpg.DataError, match="sized iterable container"):
        await db.fetchval("select $1::int[]", {1, 2})
