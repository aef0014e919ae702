"""Reading from a real standby, which takes a snapshot away when the primary vacuumed."""

import asyncio
import io
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import psycopg
import pytest
from pyspark.sql import SparkSession

from app.embedded_postgres import EmbeddedPostgres
from app.embedded_postgres.paths import find_paths
from app.migrate import migrate
from spark.engine.progress import Progress
from spark.errors import SnapshotLostError
from spark.postgres.connections import open_snapshot
from spark.proof.read_days import Wish, read_days
from spark.sources.frames import jdbc_in
from tests.spark.days import days_ago, fill_day, flip_ops, prove, rows
from tests.support import postgres, shared_servers
from tests.support.processes import free_port

pytestmark = pytest.mark.usefixtures("spark")

WAIT_S = 60
PATIENT = {"max_standby_streaming_delay": "-1"}
HASTY = {"max_standby_streaming_delay": "0", "hot_standby_feedback": "off"}


@dataclass(frozen=True)
class Primary:
    """A server with a day in which something is wrong, and where a standby of it may be."""

    server: EmbeddedPostgres
    data_dir: Path

    @contextmanager
    def standby(self, settings: Mapping[str, str]) -> Iterator[str]:
        """Copy the server, follow it, and yield the copy's url when it has all that the server has."""
        place, port = find_paths(self.data_dir), free_port()
        home = self.data_dir.parent / f"standby-{port}"
        # Laid out as the primary is, because the copied configuration includes a file two directories above.
        directory = home / place.pgdata.relative_to(place.home)
        directory.mkdir(parents=True, mode=0o700)
        for above in (home, directory.parent):
            above.chmod(0o755)
        place.account.own(directory)
        for file in place.home.glob("*.conf"):
            shutil.copy(file, home / file.name)
        as_server: dict[str, Any] = {"cwd": "/"}
        if place.account.uid is not None:
            as_server |= {"user": place.account.uid, "group": place.account.gid, "extra_groups": []}
        self._copy(directory, as_server)
        settings_of_standby = {
            "port": str(port),
            "hot_standby": "on",
            "logging_collector": "off",
            "fsync": "off",
            **settings,
        }
        options = [part for name, value in settings_of_standby.items() for part in ("-c", f"{name}={value}")]
        with (home / "log").open("w") as log:
            server = subprocess.Popen(
                [self.server.bin("postgres"), "-D", directory, *options], stdout=log, stderr=log, **as_server
            )
        shared_servers.keep(Path(os.environ[postgres.RUN]), server.pid)
        try:
            url = urlsplit(self.server.url)
            there = urlunsplit(url._replace(netloc=f"{url.netloc.rpartition(':')[0]}:{port}"))
            assert self.await_replay(there, server), (home / "log").read_text()
            yield there
        finally:
            # A fast shutdown: sessions of a test that failed do not keep it waiting.
            server.send_signal(signal.SIGINT)
            server.wait(WAIT_S)

    def _copy(self, directory: Path, as_server: Mapping[str, Any]) -> None:
        copy = [self.server.bin("pg_basebackup"), "-D", directory, "-X", "stream", "-R", "-c", "fast", "--no-sync"]
        url = urlsplit(self.server.url)
        reach = {"PGHOST": str(url.hostname), "PGPORT": str(url.port), "PGUSER": str(url.username)}
        reach["PGPASSWORD"] = unquote(url.password or "")
        subprocess.run(copy, env=os.environ | reach, check=True, **as_server)

    def await_replay(self, url: str, server: subprocess.Popen[bytes] | None = None) -> bool:
        """Wait until the standby has all that was written here; False if its `server` ended."""
        # A commit writes out what no commit of a vacuum's did.
        with psycopg.connect(self.server.url) as db:
            db.execute("update checkpoint set moved_at = now()")
        [written] = rows(self.server.url, "select pg_current_wal_flush_lsn()::text as lsn")
        replayed = "select pg_last_wal_replay_lsn() >= %s::pg_lsn as caught_up"
        deadline, said = time.monotonic() + WAIT_S, None
        while server is None or server.poll() is None:
            try:
                if rows(url, replayed, written["lsn"])[0]["caught_up"]:
                    return True
            except psycopg.OperationalError as error:
                said = error
            if time.monotonic() > deadline:
                raise TimeoutError("the standby did not catch up") from said
            time.sleep(0.05)
        return False

    def vacuum(self) -> None:
        """Remove rows that the snapshots of now show, as no standby can beside a reader."""
        with psycopg.connect(self.server.url, autocommit=True) as db:
            db.execute("update checkpoint set moved_at = now()")
            db.execute("vacuum checkpoint")


@pytest.fixture
def primary(data_dir: Path) -> Iterator[Primary]:
    # Only the tests' own vacuums may take a snapshot away.
    server = EmbeddedPostgres.start(data_dir, settings={"fsync": "off", "autovacuum": "off"})
    try:
        asyncio.run(migrate(server.url, days_ahead=0))
        fill_day(server.url, days_ago(2), 200)
        flip_ops(server.url)
        yield Primary(server, data_dir)
    finally:
        server.stop()


class Watched(io.StringIO):
    """What a run says; when it has read the first halves, the primary vacuums until the standby ends the snapshot."""

    def __init__(self, primary: Primary, standby: str) -> None:
        super().__init__()
        self._primary, self._standby = primary, standby
        self._ended = False

    def write(self, said: str) -> int:
        if '"read half"' in said and not self._ended:
            while self._held():
                self._primary.vacuum()
            # What the last of them removed would take the next snapshot away too.
            self._primary.await_replay(self._standby)
            self._ended = True
        return super().write(said)

    def _held(self) -> bool:
        found = "select from pg_stat_activity where application_name like 'halfnote proof%%' and state like 'idle in%%'"
        return bool(rows(self._standby, found))


@pytest.mark.slow
def test_a_standby_is_read_and_the_primary_written(primary: Primary, capsys: pytest.CaptureFixture[str]) -> None:
    with primary.standby(PATIENT) as url:
        assert prove(primary.server.url, "--read-url", url, "--day", days_ago(2)) == 3
        assert '"note": "standby"' not in capsys.readouterr().err
    [run] = rows(primary.server.url, "select * from reconciliation_run")
    assert (run["source"], run["state"], run["open"]) == ("standby", "findings", 1)
    assert run["seen_at"] < run["ended_at"]


@pytest.mark.slow
def test_a_run_whose_read_was_cancelled_begins_again(primary: Primary, spark: SparkSession, tmp_path: Path) -> None:
    with primary.standby(HASTY) as url:
        said = Watched(primary, url)
        wish = Wish([days_ago(2)], {}, 3600)
        read = read_days(spark, url, wish, str(tmp_path / "read"), Progress(said))
        assert '"note": "standby"' in said.getvalue()
        assert said.getvalue().count('"note": "snapshot_lost"') == 1
        assert read.standby
        [day] = read.days
        assert (day.frames.rows["half"], day.frames.half.count()) == (200, 200)


def test_a_snapshot_that_the_standby_ended_is_lost(primary: Primary) -> None:
    with primary.standby(HASTY) as url:

        def hold() -> None:
            with open_snapshot(url) as snapshot:
                deadline = time.monotonic() + WAIT_S
                while time.monotonic() < deadline:
                    primary.vacuum()
                    snapshot.rows("select 1")

        # On a busy machine the server ends the session while a statement is on its way to it.
        with pytest.raises(SnapshotLostError, match=r"conflict with recovery|server closed the connection"):
            hold()


@pytest.mark.slow
def test_a_standby_whose_database_transactions_are_serializable_by_default_is_read(
    primary: Primary, spark: SparkSession
) -> None:
    with psycopg.connect(primary.server.url) as db:
        db.execute("create role strict superuser login password 'strict'")
        db.execute("alter role strict set default_transaction_isolation = 'serializable'")
    with primary.standby(PATIENT) as url:
        parts = urlsplit(url)
        strict = urlunsplit(parts._replace(netloc=f"strict:strict@{parts.netloc.rpartition('@')[2]}"))
        assert prove(primary.server.url, "--read-url", strict, "--day", days_ago(2)) == 3
        # As executors read.
        with open_snapshot(strict) as snapshot:
            assert spark.read.jdbc(**jdbc_in(snapshot), table="(select 1 as one) source").count() == 1
    [run] = rows(primary.server.url, "select * from reconciliation_run")
    assert (run["source"], run["state"], run["open"]) == ("standby", "findings", 1)
