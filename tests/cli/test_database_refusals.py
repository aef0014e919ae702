"""`halfnote migrate` and `rotate-keys` on databases that they cannot use: one line that says what is wrong."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit, urlunsplit

import pytest

from app.database.connection import connect
from tests.lifecycle.test_serve import run
from tests.support import postgres
from tests.support.load import until
from tests.support.processes import ROOT

# What Postgres does when a table is made: the server's own errors, planted.
FAULT = """
create function fault() returns event_trigger language plpgsql as $$ begin {} end $$;
create event trigger fault on ddl_command_start when tag in ('CREATE TABLE') execute function fault()
"""
DISK_FULL = "raise exception 'could not extend file' using errcode = 'disk_full', detail = 'a row';"
HANGS = "perform pg_sleep(600);"
LOST = "perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(1);"


@pytest.fixture
def empty() -> Iterator[str]:
    """The URL of a database without tables."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


def with_parts(url: str, *, login: str | None = None, database: str | None = None) -> str:
    """Return the URL with another `user:password`, or another database."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(
        parts._replace(
            netloc=parts.netloc if login is None else f"{login}@{host}",
            path=parts.path if database is None else f"/{database}",
        )
    )


def refused(url: str, command: str, *said: str) -> None:
    """Run the command, and check that it ends with one line that says all of this."""
    ended = run(command, HALFNOTE_DATABASE_URL=url)
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith("halfnote: The database cannot be used: ")
    for part in said:
        assert part in line
    assert "Traceback" not in ended.stderr


@pytest.fixture
async def login(empty: str) -> AsyncIterator[str]:
    """The URL of a login that may connect to the empty database and nothing else."""
    name = f"r{secrets.token_hex(5)}"
    admin = await connect(empty)
    await admin.execute(f"create role {name} login password 'secret'")
    yield with_parts(empty, login=f"{name}:secret")
    await admin.execute(f"drop role {name}")
    await admin.close()


def test_a_missing_right_leads_to_the_page_about_roles(login: str) -> None:
    refused(login, "migrate", "permission denied", "docs/operations/roles.md")


@pytest.mark.parametrize("command", ["migrate", "rotate-keys"])
def test_a_wrong_password_is_named(login: str, command: str) -> None:
    wrong = login.replace(":secret@", ":wrong@")
    refused(wrong, command, "password authentication failed", "Check the user and the password")


@pytest.mark.parametrize("command", ["migrate", "rotate-keys"])
def test_a_database_that_does_not_exist_is_named(empty: str, command: str) -> None:
    refused(with_parts(empty, database="no_such"), command, '"no_such" does not exist', "Create the database")


@pytest.mark.parametrize(
    ("fault", "said"),
    [(DISK_FULL, "could not extend file. The disk of the database server is full."), (LOST, "Run the command again")],
)
async def test_a_fault_of_the_server_in_a_migration_is_named(empty: str, fault: str, said: str) -> None:
    connection = await connect(empty)
    await connection.execute(FAULT.format(fault))
    await connection.close()
    refused(empty, "migrate", said)


async def test_a_lock_that_is_held_is_named(dsn: str) -> None:
    holder = await connect(dsn)
    await holder.execute(f"alter database {urlsplit(dsn).path[1:]} set lock_timeout = '100ms'")
    async with holder.transaction():
        await holder.execute("lock table producer_group")
        refused(dsn, "rotate-keys", "lock timeout", "Another session holds a lock")
    await holder.close()


async def test_a_missing_right_of_a_rotation_is_named(dsn: str) -> None:
    name = f"r{secrets.token_hex(5)}"
    admin = await connect(dsn)
    await admin.execute(f"create role {name} login password 'secret'")
    refused(with_parts(dsn, login=f"{name}:secret"), "rotate-keys", "permission denied", "docs/operations/roles.md")
    await admin.execute(f"drop role {name}")
    await admin.close()


async def test_sigterm_ends_a_migration_that_waits_at_once(empty: str) -> None:
    """The server rolls back the revision under way, and the revision's thread holds up nothing."""
    admin = await connect(empty)
    try:
        await admin.execute(FAULT.format(HANGS))
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
        with subprocess.Popen(
            [sys.executable, "-m", "app.cli", "migrate"],
            cwd=ROOT,
            env={**inherited, "HALFNOTE_DATABASE_URL": empty},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as migration:
            try:
                await until(
                    lambda: admin.fetchval(
                        "select exists (select from pg_stat_activity "
                        "where datname = current_database() and wait_event = 'PgSleep')"
                    )
                )
                migration.terminate()
                assert migration.wait(60) == -signal.SIGTERM
            finally:
                migration.kill()
    finally:
        await admin.close()
