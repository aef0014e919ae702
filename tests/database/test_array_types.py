"""The arrays that Halfnote's connections know without reading the catalog."""

from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from app.database.array_types import ARRAYS
from app.database.connection import Connection, Database

VALUES: dict[str, list[Any]] = {
    "_bool": [True, False, None],
    "_bytea": [b"", b"\x00\xff"],
    "_int2": [-(2**15), 2**15 - 1],
    "_int4": [-(2**31), 2**31 - 1],
    "_int8": [-(2**63), 2**63 - 1],
    "_float8": [0.5, float("inf"), None],
    "_numeric": [Decimal("10.30"), None],
    "_jsonb": ['{"order": 1030}', "null", None],
    "_tid": [(0, 1), (7, 2)],
    "_date": [date(2026, 11, 30), None],
    "_timestamptz": [datetime(2026, 11, 30, 12, 0, 0, 1, UTC)],
    "_uuid": [UUID(int=1), UUID(int=2**128 - 1)],
}


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    database = Database(dsn, pool_size=1)
    yield database
    await database.close()


async def _has_read_the_catalog(connection: Connection) -> bool:
    """Return whether asyncpg's query for types is among the statements that the connection has prepared."""
    found: bool = await connection.fetchval(
        "select exists (select from pg_prepared_statements where ltrim(statement) like 'WITH RECURSIVE typeinfo%')"
    )
    return found


async def test_known_arrays_are_as_the_catalog_has_them(db: Connection) -> None:
    rows = await db.fetch(
        "select t.oid, t.typname, t.typelem from pg_type t join pg_type e on e.oid = t.typelem"
        " where t.oid = any($1) and t.typcategory = 'A' and t.typtype = 'b' and e.typdelim = ','"
        " and t.typnamespace = 'pg_catalog'::regnamespace order by t.oid",
        [oid for oid, _, _ in ARRAYS],
    )
    assert [tuple(row) for row in rows] == sorted(ARRAYS)


async def test_known_arrays_are_sent_and_returned_without_the_catalog(database: Database) -> None:
    assert VALUES.keys() == {name for _, name, _ in ARRAYS}
    for lend in (database.connection, database.keyed):
        async with lend() as connection:
            for name, value in VALUES.items():
                assert await connection.fetchval(f"select $1::{name}", value) == value
            assert not await _has_read_the_catalog(connection)


async def test_another_array_is_read_from_the_catalog(database: Database, db: Connection) -> None:
    await db.execute("create type mood as enum ('calm', 'busy')")
    async with database.connection() as connection:
        assert await connection.fetchval("select $1::mood[]", ["calm", "busy"]) == ["calm", "busy"]
        assert await _has_read_the_catalog(connection)
        # Known and unknown ones in one statement.
        row = await connection.fetchrow("select $1::interval[] as a, $2::bigint[] as b", [timedelta(1)], [2])
        assert row is not None
        assert (row["a"], row["b"]) == ([timedelta(1)], [2])
