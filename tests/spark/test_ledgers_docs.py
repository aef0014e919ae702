"""What docs/ledgers.md shows, executed as it stands there; what it writes is read as a ledger."""

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark.sources.ledger_files import PASSWORD
from spark.sources.ledgers import consumer_ledger, producer_ledger
from tests.spark.days import ROOT
from tests.support import brokers, postgres

PAGE = (ROOT / "docs" / "ledgers.md").read_text()
POSTGRES, MYSQL, CONSUMER = "### PostgreSQL", "### MySQL and MariaDB", "## Writing a consumer ledger"
SAID = ("transaction_id", "verdict")
ID = "019aa5a3-7e4c-7b1e-8f00-1030a1030a10"


def blocks(title: str) -> list[tuple[str, str]]:
    """The blocks of a section, each with its language; that of a shell has none."""
    section = re.split(r"^##", PAGE.partition(f"\n{title}\n")[2], flags=re.MULTILINE)[0]
    return re.findall(r"^```(\w*)\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def test_no_sql_stands_elsewhere() -> None:
    shown = [text for title in (POSTGRES, MYSQL, CONSUMER) for language, text in blocks(title) if language == "sql"]
    assert len(shown) == len(re.findall(r"^```sql$", PAGE, re.MULTILINE)) == 5


def execute(dsn: str, place: Path, language: str, text: str) -> subprocess.CompletedProcess[str]:
    """Execute a block of PostgreSQL's, in a directory of its own, on a database that is not called shop."""
    url, programs = urlsplit(dsn), postgres.server().bin("psql").parent
    there = {"PGHOST": str(url.hostname), "PGPORT": str(url.port), "PGUSER": unquote(url.username or "")}
    there |= {"PGPASSWORD": unquote(url.password or ""), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    name = url.path[1:]
    psql = ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", name, "-c", text]
    command = psql if language == "sql" else ["sh", "-ec", text.replace("psql shop ", f"psql {name} ")]
    return subprocess.run(command, cwd=place, env=os.environ | there, capture_output=True, text=True)


@pytest.mark.slow
def test_postgres_writes_a_ledger_as_the_page_says(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, inserted, copied = blocks(POSTGRES)
    for block in (made, inserted, copied):
        assert execute(dsn, tmp_path, *block).stderr == ""
    said = [(ID, "commit")]
    assert (
        producer_ledger(spark, str(tmp_path / "orders.csv"), str(tmp_path / "file")).rows.select(*SAID).collect()
        == said
    )

    url = urlsplit(dsn)
    monkeypatch.setenv(PASSWORD, unquote(url.password or ""))
    here = f"{url.hostname}:{url.port}{url.path}?user={url.username}"
    specs = re.findall(r"'(jdbc:[^']*)'", PAGE)
    assert len(specs) == 2
    for number, spec in enumerate(specs):
        place = str(tmp_path / f"jdbc{number}")
        found = producer_ledger(spark, spec.replace("db.example/shop?user=auditor", here), place)
        assert found.rows.select(*SAID).collect() == said

    with psycopg.connect(dsn) as db:
        db.execute("update halfnote_transaction set committed = false")
    assert "duplicate key value" in execute(dsn, tmp_path, *inserted).stderr
    assert execute(dsn, tmp_path, *copied).returncode == 0
    refused = producer_ledger(spark, str(tmp_path / "orders.csv"), str(tmp_path / "refused"))
    assert refused.rows.select(*SAID).collect() == [(ID, "rollback")]


@pytest.fixture
def mariadb() -> Iterator[list[str]]:
    """The command of a client of a database of the test's own."""
    server, name = brokers.mariadb(), f"t_{secrets.token_hex(8)}"
    client = shutil.which("mariadb") or "mysql"
    command = [client, "--no-defaults", "--protocol=tcp", f"-h{server.host}", f"-P{server.port}", "-uroot"]
    subprocess.run([*command, "-e", f"create database {name}"], check=True)
    yield [*command, name]
    subprocess.run([*command, "-e", f"drop database {name}"], check=True)


@pytest.mark.slow
def test_mariadb_writes_a_ledger_as_the_page_says(spark: SparkSession, mariadb: list[str], tmp_path: Path) -> None:
    for language, text in blocks(MYSQL):
        shell = ["sh", "-ec", text.replace("mysql shop ", f"{' '.join(mariadb)} ")]
        command = [*mariadb, "-e", text] if language == "sql" else shell
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr == ""
    found = producer_ledger(spark, str(tmp_path / "orders.csv"), str(tmp_path / "read"))
    assert found.rows.select(*SAID).collect() == [(ID, "commit")]


def test_a_consumer_that_remembers_ids_has_a_ledger(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn) as db:
        db.execute("create table consumed_message (message_id text primary key)")
        db.execute("insert into consumed_message values (%s)", [f"{ID}-0"])
    [block] = blocks(CONSUMER)
    assert execute(dsn, tmp_path, *block).stderr == ""
    url = urlsplit(dsn)
    monkeypatch.setenv(PASSWORD, unquote(url.password or ""))
    spec = f"jdbc:postgresql://{url.hostname}:{url.port}{url.path}?user={url.username}#halfnote_consumed"
    found = consumer_ledger(spark, spec, str(tmp_path / "read"))
    assert found.rows.collect() == [(f"{ID}-0", 1, "points", [])]
