"""Migrations: up and down, empty and with rows, concurrent, and under locks; their schema equals that of the models."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy.ext.asyncio import create_async_engine
from structlog.testing import capture_logs

import app.migrate
from app.cli.os_user import person
from app.database.advisory_locks import AdvisoryLock
from app.database.connection import Connection, UnusableDatabase, connect
from app.ids import uuid7
from app.lifecycle.database import refuse_behind
from app.migrate import OLDEST_SERVED, OLDEST_SERVED_RULE, alembic_config, current, head, migrate, revisions
from app.models import DAY_TABLES, metadata
from app.store.retention import days
from tests.conftest import DAYS_AHEAD
from tests.support import postgres
from tests.support.cli_runs import Run, run_alone
from tests.support.postgres import IN_THIS_DATABASE
from tests.support.processes import ROOT
from tests.support.schema_catalog import schema_of

__all__ = ["run_alone"]

OLDEST_FIRST = tuple(reversed(revisions()))
AT = datetime(2026, 11, 21, 10, 30, tzinfo=UTC)
WAITS = "select pid, query_start from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"

# Values of columns whose check constraints do not take every value of the type.
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
    ("producer_group", "checks"): "claim",
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
    "smallint[]": [1],
    "uuid[]": [uuid7(AT)],
    "date[]": [AT.date()],
}


# Tables that a revision drops.
DROPPED = {"sealing": "0012"}


@pytest.fixture
def empty() -> Iterator[str]:
    """A database with nothing in it."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


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
        "and relnamespace = 'public'::regnamespace and relname <> 'alembic_version' order by oid"
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
        # A migration may have written a row itself.
        await db.execute(f"truncate {table}")
        await db.execute(f"insert into {table} ({names}) values ({marks})", *values)
    return {table: await db.fetchval(f"select count(*) from {table}") for (table,) in tables}


async def test_models_equal_the_migrated_schema(empty: str, there: Connection, db: Connection) -> None:
    engine = create_async_engine(empty.replace("postgresql://", "postgresql+asyncpg://", 1))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    migrated = await schema_of(db)
    # The models are tables; the triggers that keep the history of subscriptions and the chain of the audit are in their
    # migrations only.
    triggers = {"audit_chain": "chain_audit", "subscription_version": "record_subscription_version"}
    kinds = [str((function, "function")) for function in triggers.values()]
    assert migrated["others"] == sorted([*kinds, *(str((trigger, "trigger")) for trigger in triggers)])
    assert await schema_of(there) == migrated | {"others": []}


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


def revision_case(revision: str) -> Any:
    """Return a revision as a parameter: all but the first and the newest two are slow."""
    quick = (OLDEST_FIRST[0], *OLDEST_FIRST[-2:])
    return pytest.param(revision, id=revision, marks=() if revision in quick else pytest.mark.slow)


def template_at(revision: str) -> str | None:
    """Make the database of a revision from that of the revision before it, once a run; return its name."""
    if revision == "base":
        return None
    before = template_at(["base", *OLDEST_FIRST][OLDEST_FIRST.index(revision)])
    return postgres.ensure_template(
        f"halfnote_revision_{revision}", lambda url: command.upgrade(alembic_config(url), revision), template=before
    )


@pytest.mark.parametrize("revision", [revision_case(revision) for revision in OLDEST_FIRST])
async def test_every_revision_goes_up_and_down_with_rows(revision: str) -> None:
    before = ["base", *OLDEST_FIRST][OLDEST_FIRST.index(revision)]
    url = await asyncio.to_thread(lambda: postgres.create_database(template_at(before)))
    there = await connect(url)
    try:
        older = await fill(there) if before != "base" else {}
        await up(url, revision)
        expected = without_dropped(older, revision)
        assert await counts(there, expected) == expected
        for table in expected:
            await there.execute(f"truncate {table}")
        newer = await fill(there)
        assert set(newer) >= set(expected)
        assert set(newer.values()) == {1}
        await down(url, before)
        assert await counts(there, older) == older
        await up(url, "head")
        expected = without_dropped(older, head())
        assert await counts(there, expected) == expected
        assert await current(there) == head()
    finally:
        await there.close()
        await asyncio.to_thread(postgres.drop_database, url)


def without_dropped(tables: dict[str, int], revision: str) -> dict[str, int]:
    """Return the tables without those that a revision up to this one drops."""
    return {table: rows for table, rows in tables.items() if DROPPED.get(table, "9999") > revision}


async def counts(db: Connection, tables: dict[str, int]) -> dict[str, int]:
    return {table: await db.fetchval(f"select count(*) from {table}") for table in tables}


async def test_migrating_a_migrated_database_changes_nothing(dsn: str, db: Connection) -> None:
    before = await schema_of(db), await days.days(db)
    await migrate(dsn, days_ahead=DAYS_AHEAD)
    assert (await schema_of(db), await days.days(db)) == before


async def test_a_manual_migration_is_audited_if_it_changed_anything(empty: str, there: Connection) -> None:
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
    await there.execute(f"select pg_advisory_lock({AdvisoryLock.MIGRATION})")
    both = [
        subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        async with asyncio.timeout(60):
            while len(await there.fetch(WAITS)) < 2:
                assert all(process.poll() is None for process in both)
                await asyncio.sleep(0.02)
        await there.execute(f"select pg_advisory_unlock({AdvisoryLock.MIGRATION})")
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
                tried |= {tuple(row) for row in await there.fetch(WAITS)}
                await asyncio.sleep(0.02)
    await migrating
    assert await current(there) == head()


async def test_database_of_a_newer_version_that_still_serves_this_one_is_taken(dsn: str, db: Connection) -> None:
    await db.execute("update alembic_version set version_num = '9999'")
    # A later version's own.
    await db.execute("update shared_rule set value = 7 where name = 'max_checks'")
    rules = await db.fetch("select * from shared_rule order by name")
    schema = await schema_of(db)
    await refuse_behind(dsn)
    assert await migrate(dsn, days_ahead=DAYS_AHEAD + 1, by=person()) == "9999"
    assert await current(db) == "9999"
    assert await schema_of(db) == schema
    assert await db.fetch("select * from shared_rule order by name") == rules
    assert await db.fetchval("select count(*) from audit") == 0
    assert len(await days.days(db)) == DAYS_AHEAD + 3


def test_a_rollback_may_run_migrate_first(run_alone: Run, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", dsn)
    assert run_alone("migrate").out == "The database is at this version's schema.\n"

    async def renumber() -> None:
        connection = await connect(dsn)
        await connection.execute("update alembic_version set version_num = '9999'")
        await connection.close()

    asyncio.run(renumber())
    after = run_alone("migrate")
    assert (after.code, after.err) == (0, "")
    assert f"stays at revision 9999, later than this version's {head()}.\nIt serves this version too." in after.out


async def test_a_later_version_that_migrates_meanwhile_is_no_error(empty: str, there: Connection) -> None:
    await up(empty, "head")
    await there.execute("insert into shared_rule values ($1, $2)", OLDEST_SERVED_RULE, float(OLDEST_SERVED))
    await there.execute(f"select pg_advisory_lock({AdvisoryLock.MIGRATION})")
    migrating = asyncio.create_task(migrate(empty, days_ahead=1))
    async with asyncio.timeout(60):
        while not await there.fetch(WAITS):
            await asyncio.sleep(0.02)
    await there.execute("update alembic_version set version_num = '9999'")
    await there.execute(f"select pg_advisory_unlock({AdvisoryLock.MIGRATION})")
    assert await migrating == "9999"


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


# Revision 0028 changes pull_claim alone, and later ones do not change it.
BEFORE, BLOCKED = "0026", "0028"


@asynccontextmanager
async def dumping(url: str, table: str) -> AsyncIterator[Connection]:
    """Hold the lock of a reader, as pg_dump does on every table, until the block ends."""
    holder = await connect(url)
    try:
        await holder.execute("set application_name = 'pg_dump'")
        async with holder.transaction():
            await holder.execute(f"lock table {table} in access share mode")
            yield holder
    finally:
        await holder.close()


async def waits_for_a_table(there: Connection) -> float:
    """Return for how long a session has waited for the lock of a table, in seconds; 0 if none waits."""
    waited: float = await there.fetchval(
        "select coalesce(max(extract(epoch from clock_timestamp() - waitstart)), 0)::float8 from pg_locks "
        f"where not granted and locktype = 'relation' and {IN_THIS_DATABASE}"
    )
    return waited


async def test_a_revision_waits_for_a_table_only_for_a_moment_at_a_time(empty: str, there: Connection) -> None:
    await up(empty, BEFORE)
    async with dumping(empty, "pull_claim"):
        migrating = asyncio.create_task(migrate(empty, days_ahead=1, by=person()))
        waits: list[float] = []
        async with asyncio.timeout(60):
            # Until it has given up waiting, and waited again, twice.
            while sum(later < earlier for earlier, later in pairwise(waits)) < 2:
                assert not migrating.done()
                waits.append(await waits_for_a_table(there))
                await asyncio.sleep(0.02)
        # What is committed stays, and old replicas work on it.
        assert await current(there) == "0027"
    await migrating
    assert max(waits) < 1, waits
    assert await current(there) == head()
    acts = await there.fetch("select target, detail::json ->> 'former' as former from audit order by audit_id")
    done = OLDEST_FIRST[OLDEST_FIRST.index(BEFORE) :]
    assert [(act["former"], act["target"]) for act in acts] == list(pairwise(done))


async def test_giving_up_names_who_holds_the_lock_and_the_next_run_goes_on(empty: str, there: Connection) -> None:
    await up(empty, BEFORE)
    async with dumping(empty, "pull_claim") as holder:
        with pytest.raises(UnusableDatabase) as refused:
            await migrate(empty, days_ahead=1, patience_s=0.5)
        assert "stays at revision 0027. The next one needs a lock that another session has held" in str(refused.value)
        assert f"pg_dump (pid {holder.get_server_pid()}, user " in str(refused.value)
        # A version that knows this revision as its own serves on it; this one refuses until it is migrated.
        with pytest.raises(UnusableDatabase, match=r"revision 0027; .* Run `halfnote migrate`"):
            await refuse_behind(empty)
    await migrate(empty, days_ahead=1)
    assert await current(there) == head()


async def test_a_long_revision_uses_up_no_patience_of_the_next(
    empty: str, there: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await up(empty, BEFORE)
    upgraded, tries = app.migrate._upgraded, 0

    async def slow(connection: Connection, config: Config) -> tuple[str, ...] | None:
        nonlocal tries
        tries += 1
        if tries == 1:
            await asyncio.sleep(0.6)
        return await upgraded(connection, config)

    monkeypatch.setattr(app.migrate, "_upgraded", slow)
    async with dumping(empty, "pull_claim"):
        migrating = asyncio.create_task(migrate(empty, days_ahead=1, patience_s=0.5))
        async with asyncio.timeout(30):
            while tries < 2:
                await asyncio.sleep(0.01)
    await migrating
    assert await current(there) == head()


async def test_a_migration_that_waits_for_another_one_says_for_whom(
    empty: str, there: Connection, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits as long as the other one works; its operator sees for which session."""
    await up(empty, BEFORE)
    monkeypatch.setattr(app.migrate, "SAY_EVERY_S", 0.2)
    await there.execute(f"select pg_advisory_lock({AdvisoryLock.MIGRATION})")
    with capture_logs() as logs:
        migrating = asyncio.create_task(migrate(empty, days_ahead=1))
        async with asyncio.timeout(30):
            while sum(entry["event"] == "migration_waits" for entry in logs) < 2:
                assert not migrating.done()
                await asyncio.sleep(0.01)
        await there.execute(f"select pg_advisory_unlock({AdvisoryLock.MIGRATION})")
        await migrating
    said = [entry["blockers"] for entry in logs if entry["event"] == "migration_waits"]
    assert all(f"(pid {there.get_server_pid()}, user " in one for [one] in said)
    assert await current(there) == head()


async def test_a_killed_migration_is_continued(empty: str, there: Connection, db: Connection) -> None:
    await up(empty, BEFORE)
    await there.execute("delete from shared_rule")
    program = f"import asyncio, app.migrate as m; asyncio.run(m.migrate({empty!r}, days_ahead=3))"
    async with dumping(empty, "pull_claim"):
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        try:
            async with asyncio.timeout(60):
                # An earlier revision may wait for the lock of a table too, for a moment.
                while await waits_for_a_table(there) == 0 or await current(there) != "0027":
                    assert process.poll() is None
                    await asyncio.sleep(0.01)
        finally:
            process.kill()
            process.wait()
    assert await current(there) == "0027"
    # The rule is as new as the schema, so that no version starts that the schema does not serve.
    assert await there.fetchval("select value from shared_rule where name = $1", OLDEST_SERVED_RULE) == int(
        OLDEST_SERVED
    )
    await migrate(empty, days_ahead=3)
    assert await schema_of(there) == await schema_of(db)
    assert len(await days.days(there)) == 5


SEEN = """
create table seen (program text, commits text, statement_timeout text);
create function see() returns event_trigger language plpgsql as $$ begin
  insert into public.seen values (current_setting('application_name'), current_setting('synchronous_commit'),
    current_setting('statement_timeout'));
end $$;
create event trigger see on ddl_command_end when tag in ('ALTER TABLE') execute function see();
"""


async def test_the_limits_of_a_role_do_not_hold_for_migrations(empty: str, there: Connection) -> None:
    await up(empty, BEFORE)
    await there.execute(SEEN)
    for setting in ("statement_timeout = '30s'", "synchronous_commit = off"):
        await there.execute(f"alter database {empty.rpartition('/')[2]} set {setting}")
    await migrate(empty, days_ahead=1)
    await there.execute("drop event trigger see")
    seen = {tuple(row) for row in await there.fetch("select distinct program, commits, statement_timeout from seen")}
    # The partitions are attached on a connection of their own.
    assert seen == {("halfnote", "on", "0"), ("halfnote", "on", "30s")}
