"""Migrations: up and down from nothing and with rows, at once, beside locks, and what they make is what models say."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy.ext.asyncio import create_async_engine

from app.cli.person import person
from app.database import Connection, UnusableDatabase, connect
from app.ids import uuid7
from app.migrate import alembic_config, current, head, migrate, revisions
from app.models import DAY_TABLES, metadata
from app.start import refuse_behind
from app.store import days
from tests import pg
from tests.catalog import schema_of
from tests.processes import ROOT

OLDEST_FIRST = tuple(reversed(revisions()))
AT = datetime(2026, 11, 21, 10, 30, tzinfo=UTC)
WAITS = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"

# What a column's check constraint wants of a row, where any value of its type would not do.
CHOSEN = {
    "on_exhausted": "park",
    "kind": "check",
    "verdict": 1,
    "source": 0,
    ("day", "state"): "open",
    ("check_back", "state"): 2,
    ("subscription", "state"): "active",
    ("replay", "state"): "running",
    "role": "metrics",
    ("audit", "role"): "x",
    ("reconciliation_run", "state"): "proved",
    ("reconciliation_run", "source"): "standby",
    ("reconciliation_day", "state"): "final",
    "ordered": "key",
    "on_dead": "hold",
    "what": "dropped",
}
OF_TYPE: dict[str, Any] = {
    "text": "x",
    "integer": 1,
    "smallint": 1,
    "bigint": 1,
    "double precision": 1.5,
    "boolean": True,
    "bytea": b"\x00\xff",
    "jsonb": "{}",
    "date": AT.date(),
    "timestamp with time zone": AT,
    "uuid": uuid7(AT),
    "text[]": ["x"],
    "double precision[]": [1.5],
    "date[]": [AT.date()],
}


@pytest.fixture
def empty() -> Iterator[str]:
    """A database with nothing in it."""
    url = pg.create_database()
    yield url
    pg.drop_database(url)


@pytest.fixture
async def there(empty: str) -> AsyncIterator[Connection]:
    """A connection to the empty database."""
    connection = await connect(empty)
    yield connection
    await connection.close()


async def up(url: str, revision: str) -> None:
    await asyncio.to_thread(command.upgrade, alembic_config(url), revision)


async def down(url: str, revision: str) -> None:
    await asyncio.to_thread(command.downgrade, alembic_config(url), revision)


async def fill(db: Connection) -> dict[str, int]:
    """Write one row into every table, all columns set; return the tables' row counts."""
    tables = await db.fetch(
        "select relname from pg_class where relkind in ('r', 'p') and not relispartition "
        "and relnamespace = 'public'::regnamespace and relname <> 'alembic_version'"
    )
    for (table,) in tables:
        if table in DAY_TABLES:
            async with db.transaction():
                await days.attach(db, table, date(2026, 11, 21))
        columns = await db.fetch(
            "select attname, format_type(atttypid, atttypmod) from pg_attribute "
            "where attrelid = $1::regclass and attnum > 0 and not attisdropped and attidentity = ''",
            table,
        )
        values = [CHOSEN.get((table, name), CHOSEN.get(name, OF_TYPE[kind])) for name, kind in columns]
        names = ", ".join(f'"{name}"' for name, _ in columns)
        marks = ", ".join(f"${n}" for n in range(1, len(values) + 1))
        # A migration may have written a row of its own.
        await db.execute(f"truncate {table}")
        await db.execute(f"insert into {table} ({names}) values ({marks})", *values)
    return {table: await db.fetchval(f"select count(*) from {table}") for (table,) in tables}


async def test_models_say_what_migrations_make(empty: str, there: Connection, db: Connection) -> None:
    engine = create_async_engine(empty.replace("postgresql://", "postgresql+asyncpg://", 1))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    assert await schema_of(there) == await schema_of(db)


async def test_every_revision_goes_up_and_down_from_nothing(empty: str, there: Connection) -> None:
    schemas = [await schema_of(there)]
    for revision in OLDEST_FIRST:
        await up(empty, revision)
        schemas.append(await schema_of(there))
        assert schemas[-1] != schemas[-2]
    for before, revision in zip(reversed(schemas[:-1]), ["base", *OLDEST_FIRST[:-1]][::-1], strict=True):
        await down(empty, revision)
        assert await schema_of(there) == before
    await migrate(empty, days_ahead=1)
    assert await schema_of(there) == schemas[-1]


@pytest.mark.parametrize("revision", OLDEST_FIRST)
async def test_every_revision_goes_up_and_down_with_rows(empty: str, there: Connection, revision: str) -> None:
    before = ["base", *OLDEST_FIRST][OLDEST_FIRST.index(revision)]
    older: dict[str, int] = {}
    if before != "base":
        await up(empty, before)
        older = await fill(there)
    await up(empty, revision)
    assert await counts(there, older) == older
    for table in older:
        await there.execute(f"truncate {table}")
    newer = await fill(there)
    assert set(newer) >= set(older)
    assert set(newer.values()) == {1}
    await down(empty, before)
    assert await counts(there, older) == older
    await up(empty, "head")
    assert await counts(there, older) == older
    assert await current(there) == head()


async def counts(db: Connection, tables: dict[str, int]) -> dict[str, int]:
    return {table: await db.fetchval(f"select count(*) from {table}") for table in tables}


async def test_migrating_a_migrated_database_changes_nothing(dsn: str, db: Connection) -> None:
    before = await schema_of(db), await days.days(db)
    await migrate(dsn, days_ahead=7)
    assert (await schema_of(db), await days.days(db)) == before


async def test_who_migrates_by_hand_is_on_record_if_anything_changed(empty: str, there: Connection) -> None:
    def by_hand() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "app.cli", "migrate"]
        environment = {**os.environ, "HALFNOTE_DATABASE_URL": empty}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    for _ in range(2):
        assert (await asyncio.to_thread(by_hand)).returncode == 0
    await down(empty, OLDEST_FIRST[-2])
    await migrate(empty, days_ahead=1)
    await down(empty, OLDEST_FIRST[-2])
    assert (await asyncio.to_thread(by_hand)).returncode == 0
    acts = await there.fetch("select * from audit order by audit_id")
    assert [(act["what"], act["target"], json.loads(act["detail"])) for act in acts] == [
        ("database.migrate", head(), {}),
        ("database.migrate", head(), {"former": OLDEST_FIRST[-2]}),
    ]
    assert {act["actor"] for act in acts} == {person().name}


async def test_two_processes_migrate_at_once(empty: str, there: Connection, db: Connection) -> None:
    program = f"import asyncio, app.migrate as m; asyncio.run(m.migrate({empty!r}, days_ahead=3))"
    # Until both wait for it, neither has begun.
    await there.execute("select pg_advisory_lock(7002)")
    both = [
        subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        async with asyncio.timeout(60):
            while len(await there.fetch(WAITS)) < 2:
                assert all(process.poll() is None for process in both)
        await there.execute("select pg_advisory_unlock(7002)")
        for process in both:
            _, errors = await asyncio.to_thread(process.communicate, timeout=60)
            assert (process.returncode, errors.decode()) == (0, "")
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert await schema_of(there) == await schema_of(db)
    assert await there.fetchval("select count(*) from alembic_version") == 1
    assert len(await days.days(there)) == 5


async def test_lock_in_the_way_is_waited_for_in_turns(empty: str, there: Connection) -> None:
    await up(empty, OLDEST_FIRST[-2])
    async with there.transaction():
        await there.execute("lock table alembic_version in access exclusive mode")
        migrating = asyncio.create_task(migrate(empty, days_ahead=1))
        tried = set()
        async with asyncio.timeout(60):
            while len(tried) < 2:
                assert not migrating.done()
                # In a database transaction the activity is read but once.
                await there.execute("select pg_stat_clear_snapshot()")
                tried |= {row["pid"] for row in await there.fetch(WAITS)}
    await migrating
    assert await current(there) == head()


async def test_database_of_a_newer_version_that_still_serves_this_one_is_taken(dsn: str, db: Connection) -> None:
    await db.execute("update alembic_version set version_num = '9999'")
    await refuse_behind(dsn)
    with pytest.raises(UnusableDatabase, match=r"9999, which is newer than this Halfnote"):
        await migrate(dsn, days_ahead=1)
    assert await current(db) == "9999"


@pytest.mark.parametrize(
    "rule", ["update shared_rule set value = 9999 where name = $1", "delete from shared_rule where name = $1"]
)
async def test_database_of_a_newer_version_is_refused(dsn: str, db: Connection, rule: str) -> None:
    await db.execute("update alembic_version set version_num = '9999'")
    await db.execute(rule, "oldest_served_revision")
    for refusing in (migrate(dsn, days_ahead=1), refuse_behind(dsn)):
        with pytest.raises(UnusableDatabase, match=r"9999, which is newer than this Halfnote"):
            await refusing
    assert await current(db) == "9999"


async def test_database_that_is_behind_is_refused_naming_the_command(empty: str, there: Connection) -> None:
    with pytest.raises(UnusableDatabase, match=r"revision none; .* Run `halfnote migrate`"):
        await refuse_behind(empty)
    await up(empty, OLDEST_FIRST[0])
    with pytest.raises(UnusableDatabase, match=rf"revision {OLDEST_FIRST[0]}; .* Run `halfnote migrate`"):
        await refuse_behind(empty)
    await migrate(empty, days_ahead=1)
    await refuse_behind(empty)
