"""The same run on other engines and by other ways in: the same findings."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyspark
import pytest

from tests.spark.days import ROOT, days_ago, fill_day, flip_ops, prove, rows, start_proof

pytestmark = pytest.mark.usefixtures("spark")

SPARK_HOME = Path(pyspark.__file__).parent


@pytest.fixture
def faulty(dsn: str) -> str:
    """A database with a day in which something is wrong."""
    fill_day(dsn, days_ago(5), 3000)
    flip_ops(dsn, 3)
    return dsn


def outcome(dsn: str) -> tuple[Any, ...]:
    """What the last run found, but for times and its number; and its engine."""
    found = rows(dsn, "select day, kind, subject, detail from finding where resolved_at is null order by 1, 2, 3")
    [day] = rows(dsn, "select state, counts, found, signature, figures from reconciliation_day")
    return found, day


def engine(dsn: str) -> str:
    return str(rows(dsn, "select engine from reconciliation_run order by run_id desc limit 1")[0]["engine"])


def forget(dsn: str) -> None:
    with psycopg.connect(dsn) as db:
        db.execute("truncate finding, reconciliation_day")


def ended(started: subprocess.Popen[str]) -> int:
    """Wait for a run's end and return its status; 1 and 2 fail with what it said."""
    # Under spark-submit all that Python says comes out as one.
    out, said = started.communicate(timeout=240)
    assert started.returncode in (0, 3), out + said
    return started.returncode


def test_spark_submit_and_another_time_zone_find_the_same(faulty: str, tmp_path: Path) -> None:
    """The file itself is what spark-submit runs, from wherever; machine, JVM and database live in zones far
    from UTC."""
    assert prove(faulty, "--day", days_ago(5)) == 3
    here = outcome(faulty)
    assert len(here[0]) == 3
    forget(faulty)
    with psycopg.connect(faulty, autocommit=True) as db:
        db.execute(f"alter database {db.info.dbname} set timezone = 'Pacific/Chatham'")
        db.execute(f"alter database {db.info.dbname} set datestyle = 'SQL, DMY'")
    program = (str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[1]", str(ROOT / "spark/jobs/reconcile.py"))
    abroad = {"TZ": "America/St_Johns", "JAVA_TOOL_OPTIONS": "-Duser.timezone=Asia/Kathmandu"}
    started = start_proof(faulty, tmp_path, "--day", days_ago(5), program=program, cwd=tmp_path, **abroad)
    assert ended(started) == 3
    assert outcome(faulty) == here
    assert engine(faulty) == "local[1]"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A standalone master and one worker with a core; the master's URL."""
    started = []
    try:
        started.append(spark_class(tmp_path, "master.Master", "--host", "127.0.0.1", "--port", "0"))
        [url] = until(
            started[0], tmp_path / "master.Master.log", r"Starting Spark master at (spark://127\.0\.0\.1:\d+)"
        )
        of_worker = ("--cores", "1", "--memory", "1g", "--work-dir", str(tmp_path / "work"), "--host", "127.0.0.1")
        started.append(spark_class(tmp_path, "worker.Worker", *of_worker, url))
        until(started[1], tmp_path / "worker.Worker.log", r"Successfully registered with master")
        yield url
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def spark_class(place: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK"))}
    here = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(place / "local")}
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--webui-port", "0"]
    with (place / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments],
            env=inherited | here | {"SPARK_DAEMON_MEMORY": "256m"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def until(process: subprocess.Popen[bytes], log: Path, sign: str) -> tuple[str, ...]:
    """Wait until a log has a sign; return its groups."""
    deadline = time.monotonic() + 120
    while (found := re.search(sign, log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found.groups()


def test_a_standalone_cluster_finds_the_same(faulty: str, cluster: str, tmp_path: Path) -> None:
    assert prove(faulty, "--day", days_ago(5)) == 3
    here = outcome(faulty)
    forget(faulty)
    program = (sys.executable, "-m", "spark.jobs.reconcile")
    started = start_proof(faulty, tmp_path, "--day", days_ago(5), "--master", cluster, program=program)
    assert ended(started) == 3
    assert outcome(faulty) == here
    assert engine(faulty) == cluster
