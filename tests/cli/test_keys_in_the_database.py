"""`halfnote keys` on the database itself: what it refuses, and what it says."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from tests.support.cli_runs import Run, run_alone
from tests.support.processes import free_port

__all__ = ["run_alone"]

# Ends the session at its commit.
ENDS_AT_COMMIT = """
create function end_session() returns trigger language plpgsql as
$$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$;
create constraint trigger ends after insert on api_key deferrable initially deferred
for each row execute function end_session()
"""
ACTS = (("create", "--role", "viewer"), ("rotate", "1"), ("revoke", "1", "--yes"), ("list",))


@pytest.fixture
def keys(run_alone: Run, dsn: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `halfnote keys` on the test's database."""
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", dsn)
    return lambda *arguments: run_alone("keys", *arguments)


@pytest.fixture
def reader(dsn: str) -> Iterator[str]:
    """The database's URL with a user who may only read."""
    parts = urlsplit(dsn)
    user = f"reader_{parts.path[1:]}"
    name = sql.Identifier(user)
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(sql.SQL("create role {} login password 'p1030'").format(name))
        db.execute(sql.SQL("grant select on all tables in schema public to {}").format(name))
        yield parts._replace(netloc=f"{user}:p1030@{parts.netloc.rpartition('@')[2]}").geturl()
        db.execute(sql.SQL("drop owned by {0}; drop role {0}").format(name))


@pytest.mark.parametrize("act", ACTS)
def test_a_database_that_does_not_answer_is_named(keys: Run, monkeypatch: pytest.MonkeyPatch, act: list[str]) -> None:
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", f"postgresql://u:s3cret@127.0.0.1:{free_port()}/halfnote")
    refused = keys(*act)
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("halfnote: The database cannot be used: ")
    assert refused.err.endswith("Check HALFNOTE_DATABASE_URL.\n")
    assert "s3cret" not in refused.err


def test_a_database_that_is_not_migrated_is_named(keys: Run, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute("drop table alembic_version")
    refused = keys("list")
    assert (refused.code, refused.out) == (1, "")
    assert "Run `halfnote migrate`" in refused.err


def test_a_user_without_rights_is_told_whom_to_name(
    keys: Run, dsn: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keys("create", "--role", "viewer").code == 0
    monkeypatch.setenv("HALFNOTE_DATABASE_URL", reader)
    assert keys("list").code == 0
    for act in ACTS[:3]:
        refused = keys(*act)
        assert (refused.code, refused.out) == (1, "")
        said = "The database cannot be used: permission denied for table service_switch. The login lacks a right."
        assert refused.err.startswith(f"halfnote: {said}")
        assert "docs/operations/roles.md" in refused.err
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(
            sql.SQL("revoke all on alembic_version from {}").format(sql.Identifier(str(urlsplit(reader).username)))
        )
    assert "lacks a right" in keys("list").err


def test_a_server_that_takes_no_writes_is_told(keys: Run, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db:
        name = sql.Identifier(urlsplit(dsn).path[1:])
        db.execute(sql.SQL("alter database {} set default_transaction_read_only = on").format(name))
    refused = keys("create", "--role", "viewer")
    assert (refused.code, refused.out) == (1, "")
    assert "The server takes no writes. Name the primary in HALFNOTE_DATABASE_URL." in refused.err


def test_a_lost_commit_is_told_with_the_key_that_nobody_saw(keys: Run, dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as db:
        db.execute(ENDS_AT_COMMIT)
    refused = keys("create", "--role", "viewer")
    assert (refused.code, refused.out) == (1, "")
    assert refused.err.startswith("halfnote: The connection to the database broke: ")
    assert "halfnote keys list" in refused.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("rotate", "99999999999999999999"), "KEY_ID"),
        (("rotate", "0"), "KEY_ID"),
        (("revoke", str(2**31), "--yes"), "KEY_ID"),
        (("rotate", "1", "--overlap-s", "99999999999999999999"), "overlap_s"),
        (("rotate", "1", "--overlap-s", "2592001"), "overlap_s"),
        (("rotate", "1", "--overlap-s=-1"), "overlap_s"),
        (("create", "--role", "viewer", "--rate-per-s", "nan"), "--rate-per-s"),
        (("create", "--role", "viewer", "--rate-per-s", "1e300"), "rate_per_s"),
        (("create", "--role", "viewer", "--expires-at", "0001-01-01T00:00:00+10:00"), "expires_at"),
        (("create", "--role", "viewer", "--expires-at", "tomorrow"), "expires_at"),
        (("create", "--role", "producer", "--group", "a\udcff", "--topic", "*"), "UTF-8"),
    ],
)
def test_a_value_out_of_bounds_is_refused(keys: Run, arguments: tuple[str, ...], named: str) -> None:
    assert keys("create", "--role", "viewer").code == 0
    refused = keys(*arguments)
    assert (refused.code, refused.out) == (2, "")
    assert named in refused.err
    [key] = keys("list", "--json").json
    assert (key["expires_at"], key["revoked_at"]) == (None, None)
