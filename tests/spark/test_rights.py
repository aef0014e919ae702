"""The role of docs/reconciliation.md, "Rights": its SQL is run, and the role proves, archives, restores and redacts."""

import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from spark.jobs import archive, redact, restore
from tests.spark.archives import DAY, MadeDay, row_of
from tests.spark.days import days_ago, fill_day, prove, rows
from tests.support.processes import ROOT

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def dsn(settled_day_made: MadeDay, tmp_path: Path) -> Iterator[str]:
    with settled_day_made.copied(tmp_path / "archive") as url:
        yield url


@pytest.fixture
def login(dsn: str) -> Iterator[str]:
    """The URL of the page's role, under a name of its own, because roles are the server's."""
    parts, name = urlsplit(dsn), f"r{secrets.token_hex(5)}"
    section = (ROOT / "docs" / "reconciliation.md").read_text().partition("### Rights")[2].partition("\n### ")[0]
    [block] = re.findall(r"```sql\n(.*?)```", section, re.DOTALL)
    block = block.replace("database halfnote", f"database {parts.path[1:]}").replace("halfnote_proof", name)
    with psycopg.connect(dsn) as admin:
        for statement in block.split(";\n"):
            admin.execute(sql.SQL(statement))
    host = parts.netloc.rpartition("@")[2]
    yield urlunsplit(parts._replace(netloc=f"{name}:change%20me@{host}"))
    with psycopg.connect(dsn) as admin:
        admin.execute(sql.SQL("drop owned by {0} cascade").format(sql.Identifier(name)))
        admin.execute(sql.SQL("drop role {0}").format(sql.Identifier(name)))


def test_the_role_proves_archives_restores_and_redacts(
    settled_day_made: MadeDay, dsn: str, login: str, tmp_path: Path
) -> None:
    fill_day(dsn, days_ago(2), 5, first=1000)
    assert prove(login, "--day", days_ago(2)) == 0
    root, message_id = str(tmp_path / "archive"), f"{settled_day_made.ids[0]}-0"
    assert archive.main(["--database-url", login, "--archive", root]) == 0
    assert archive.main(["--database-url", login, "--verify"]) == 0
    with psycopg.connect(dsn) as db:
        db.execute("update day set state = 'gone' where day = %s", [DAY])
    for options in ((), ("--drop",)):
        assert restore.main(["--database-url", login, str(DAY), *options]) == 0
    assert redact.main(["--database-url", login, message_id, "--reason", "request 17"]) == 0
    assert archive.main(["--database-url", login, "--archive", root, "--keep-s", "86400"]) == 0
    assert row_of(dsn).archive is None
    done = [act["what"] for act in rows(dsn, "select what from audit where what like 'archive.%%' order by audit_id")]
    assert done == [f"archive.{what}" for what in ("write", "restore", "drop_restored", "redact", "expire")]
    for forbidden in ("delete from half", "update op set reason = ''", "delete from audit", "delete from day"):
        with psycopg.connect(login) as db, pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.execute(forbidden)
