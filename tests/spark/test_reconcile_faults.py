"""What goes wrong in the middle of a run: it fails cleanly, leaves nothing half-written, and the next one heals."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import psutil
import psycopg
import pyarrow.dataset
import pytest

from app.embedded_postgres import EmbeddedPostgres
from app.migrate import migrate
from spark.postgres.connections import partition_name
from spark.proof.read_days import MOST_SNAPSHOTS
from spark.schemas import BIG
from tests.spark.days import Connection, days_ago, fill_day, flip_ops, prove, rows, start_proof

pytestmark = pytest.mark.usefixtures("spark")

COUNT = 2000
TABLES = ("reconciliation_run", "reconciliation_day", "finding")


@pytest.fixture
def started(dsn: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A real run over a day with one fault; its files are below `tmp`, its output is below `out`."""
    fill_day(dsn, days_ago(2), COUNT)
    flip_ops(dsn)
    (tmp_path / "tmp").mkdir()
    run = start_proof(dsn, tmp_path / "tmp", "--day", days_ago(2), "--out", tmp_path / "out", "--master", "local[2]")
    yield run
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


@pytest.fixture
def running(started: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The run, when it has read the halves of its day and reads on."""
    until(started, '"read half"')
    return started


def until(started: subprocess.Popen[str], sign: str) -> None:
    """Read what a run says up to a sign; fail with all it said if it ends before."""
    assert started.stderr is not None
    said = []
    for line in started.stderr:
        said.append(line)
        if sign in line:
            return
    raise AssertionError("".join(said))


def written(dsn: str) -> list[int]:
    return [rows(dsn, f"select count(*) as rows from {table}")[0]["rows"] for table in TABLES]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_run_that_is_ended_leaves_nothing(
    running: subprocess.Popen[str], dsn: str, tmp_path: Path, number: signal.Signals
) -> None:
    end(running, number)
    assert written(dsn) == [0, 0, 0]
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "sign"),
    # The script that starts Java is there; Spark's context is being made.
    [
        (signal.SIGTERM, "halfnote-proof-*/java"),
        pytest.param(signal.SIGINT, "halfnote-proof-*/local/*", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_ended_while_java_starts_leaves_no_java(
    started: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, sign: str
) -> None:
    deadline = time.monotonic() + 120
    while not (psutil.Process(started.pid).children() and list((tmp_path / "tmp").glob(sign))):
        assert started.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    end(started, number)
    assert list((tmp_path / "tmp").iterdir()) == []


def end(run: subprocess.Popen[str], number: signal.Signals) -> None:
    """Send a signal to a run; see that it and its Java end, and that it says why."""
    [java] = psutil.Process(run.pid).children()
    run.send_signal(number)
    # Whatever is left of it would hold these pipes open.
    _, said = run.communicate(timeout=120)
    assert run.returncode == 128 + number, said
    assert f"Ended by {number.name}" in said
    assert "Traceback" not in said
    assert not java.is_running()


@pytest.mark.slow
def test_a_run_that_was_killed_is_cleared_away_by_the_next(
    running: subprocess.Popen[str], dsn: str, tmp_path: Path
) -> None:
    running.kill()
    # Its Java, which holds the pipes open, ends by itself.
    running.communicate(timeout=120)
    [left] = (tmp_path / "tmp").glob("halfnote-proof-*")
    assert prove(dsn, "--day", days_ago(2), "--staging", tmp_path / "tmp", "--out", tmp_path / "out") == 3
    assert not left.exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["findings", "report.html"]
    assert written(dsn) == [1, 1, 1]


@pytest.mark.slow
def test_a_database_that_goes_away_in_mid_read(data_dir: Path, tmp_path: Path) -> None:
    server = EmbeddedPostgres.start(data_dir)
    try:
        asyncio.run(migrate(server.url, days_ahead=1))
        fill_day(server.url, days_ago(2), COUNT)
        flip_ops(server.url)
        (tmp_path / "tmp").mkdir()
        options = ("--day", days_ago(2), "--out", tmp_path / "out", "--master", "local[2]")
        started = start_proof(server.url, tmp_path / "tmp", *options)
        until(started, '"read half"')
        server.kill()
        _, said = started.communicate(timeout=120)
        assert started.returncode == 1, said
        assert "A read failed: " in said or "The database failed while it was read: " in said
        assert "Traceback" not in said
        assert list((tmp_path / "tmp").glob("halfnote-proof-*")) == []
        assert list((tmp_path / "out").iterdir()) == []
        server = EmbeddedPostgres.start(data_dir)
        assert written(server.url) == [0, 0, 0]
        assert prove(server.url, *options[:4]) == 3
        assert written(server.url) == [1, 1, 1]
    finally:
        server.stop()


@pytest.mark.slow
def test_what_was_not_put_in_place_after_the_commit_is_by_the_next_run(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what was never committed is not, although it was complete."""
    out = tmp_path / "out"
    fill_day(dsn, days_ago(2), 10)
    [flipped] = flip_ops(dsn)
    out.mkdir()
    (out / "findings").write_text("in the way")
    assert prove(dsn, "--day", days_ago(2), "--out", out) == 1
    assert "The database has the result; the next run with this --out writes the files." in capsys.readouterr().err
    assert [(run["state"], run["open"]) for run in rows(dsn, "select * from reconciliation_run")] == [("findings", 1)]
    assert not (out / "report.html").exists()

    (out / "findings").unlink()
    [left] = out.glob(".run-*")
    other = out / ".run-other"
    shutil.copytree(left, other)
    (other / "findings" / f"day={days_ago(2)}").rename(other / "findings/day=2020-01-01")
    (other / "run.json").write_text((left / "run.json").read_text().replace('"run_id": 1', '"run_id": 1030'))
    # Of a day with nothing in it; the day before is not due.
    assert prove(dsn, "--day", days_ago(1), "--out", out) == 0
    days = {path.name for path in (out / "findings").iterdir()}
    assert days == {f"day={days_ago(2)}", f"day={days_ago(1)}"}
    found = pyarrow.dataset.dataset(out / "findings", partitioning="hive").to_table().to_pylist()
    assert [row["transaction_id"] for row in found] == [flipped]
    assert sorted(path.name for path in out.iterdir()) == ["findings", "report.html"]


def drop_day(db: Connection, day: date) -> None:
    """Take a day away as upkeep does."""
    for table in BIG:
        db.execute(f"drop table {partition_name(table, day)}")
    db.execute("update day set state = 'gone' where day = %s", [day])


@pytest.mark.slow
def test_a_day_that_leaves_while_the_run_begins_is_left_out(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first snapshot shows the day, whose tables are dropped before they are locked; the next does not show it."""
    leaving, other = days_ago(5), days_ago(2)
    fill_day(dsn, leaving, 10)
    fill_day(dsn, other, 10, first=1000)
    waiting = "select from pg_locks l join pg_stat_activity a using (pid) where not l.granted"
    waiting += " and a.application_name like 'halfnote proof%%' and a.datname = current_database()"
    with psycopg.connect(dsn) as upkeep, ThreadPoolExecutor(1) as thread:
        upkeep.execute("update op set verdict = 2 where decided_at = (select max(decided_at) from op)")
        upkeep.commit()
        tables = ", ".join(partition_name(table, leaving) for table in BIG)
        upkeep.execute(f"lock table {tables} in access exclusive mode")

        def leave() -> None:
            deadline = time.monotonic() + 60
            while not rows(dsn, waiting):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            drop_day(upkeep, leaving)
            upkeep.commit()

        left = thread.submit(leave)
        assert prove(dsn) == 3
        left.result()
    said = capsys.readouterr().err
    assert said.count('"note": "snapshot_lost"') == 1
    assert "A day was removed while the run began" in said
    [run] = rows(dsn, "select * from reconciliation_run")
    assert (run["state"], run["open"]) == ("findings", 1)
    assert leaving not in run["days"]
    assert other in run["days"]
    assert [row["day"] for row in rows(dsn, "select day from finding")] == [other]


def test_a_run_that_loses_each_snapshot_fails(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A person dropped a table, and the day's row says that it exists."""
    fill_day(dsn, days_ago(2), 10)
    with psycopg.connect(dsn) as db:
        db.execute(f"drop table {partition_name('op', days_ago(2))}")
    assert prove(dsn) == 1
    said = capsys.readouterr().err
    assert said.count('"note": "snapshot_lost"') == MOST_SNAPSHOTS - 1
    missing = f'relation "{partition_name("op", days_ago(2))}" does not exist'
    assert (
        f"None of {MOST_SNAPSHOTS} snapshots stayed open long enough. A day was removed while the run began: {missing}"
        in said
    )
    assert "Traceback" not in said
    [run] = rows(dsn, "select * from reconciliation_run")
    assert (run["state"], missing in run["error"]) == ("failed", True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 16 KB."""
    place = tmp_path / "small"
    place.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root (sudo make test)")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a small file system (in a container: --cap-add SYS_ADMIN)")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.slow
def test_a_full_disk_under_the_output(dsn: str, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_day(dsn, days_ago(2), 100)
    flip_ops(dsn)
    assert prove(dsn, "--day", days_ago(2), "--out", small_disk / "out") == 1
    said = capsys.readouterr().err
    assert f"{small_disk}/out cannot be written: " in said
    assert "No space left on device" in said
    assert "Traceback" not in said
    [run] = rows(dsn, "select * from reconciliation_run")
    assert run["state"] == "failed"
    assert "No space left on device" in run["error"]
    assert written(dsn) == [1, 0, 0]
    assert list((small_disk / "out").iterdir()) == []


@pytest.mark.slow
def test_a_database_that_does_not_take_the_result(dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever fails at the end takes the whole run back."""
    fill_day(dsn, days_ago(2), 10)
    flip_ops(dsn)
    with psycopg.connect(dsn) as db:
        db.execute("alter table reconciliation_day add constraint full_up check (state = 'nothing')")
    assert prove(dsn, "--day", days_ago(2), "--out", tmp_path) == 1
    assert "The database did not accept the result: " in capsys.readouterr().err
    assert [row["state"] for row in rows(dsn, "select state from reconciliation_run")] == ["failed"]
    assert written(dsn) == [1, 0, 0]
    assert list(tmp_path.iterdir()) == []
