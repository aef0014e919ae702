"""What goes wrong in the middle of a run: it fails cleanly, leaves nothing half-written, and the next one heals."""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest

from app.embedded import EmbeddedPostgres
from app.migrate import migrate
from tests.spark.days import days_ago, fill_day, flip_ops, prove, rows, start_proof

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


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
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
    [(signal.SIGTERM, "halfnote-proof-*/java"), (signal.SIGINT, "halfnote-proof-*/local/*")],
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


def test_a_database_that_does_not_take_the_result(dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever fails at the end takes the whole run back."""
    fill_day(dsn, days_ago(2), 10)
    flip_ops(dsn)
    with psycopg.connect(dsn) as db:
        db.execute("alter table reconciliation_day add constraint full_up check (state = 'nothing')")
    assert prove(dsn, "--day", days_ago(2), "--out", tmp_path) == 1
    assert "The database did not take the result: " in capsys.readouterr().err
    assert [row["state"] for row in rows(dsn, "select state from reconciliation_run")] == ["failed"]
    assert written(dsn) == [1, 0, 0]
    assert list(tmp_path.iterdir()) == []
