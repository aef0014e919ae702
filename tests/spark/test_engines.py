"""The same run on other engines and by other ways in: the same findings."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pyspark
import pytest

from spark.engine.jdbc_driver import jar_settings
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
    command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--webui-port", "0"]
    with (place / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, *arguments],
            env=of_spark(place) | {"SPARK_DAEMON_MEMORY": "256m"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


@pytest.fixture
def connect_server(tmp_path: Path) -> Iterator[str]:
    """A Spark Connect server of its own; its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    settings = jar_settings() | {
        "spark.master": "local[2]",
        "spark.connect.grpc.binding.port": str(port),
        "spark.ui.enabled": "false",
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    options = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    log = tmp_path / "connect.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["bash", str(SPARK_HOME / "sbin/start-connect-server.sh"), "--wait", *options],
            cwd=tmp_path,
            env=of_spark(tmp_path) | {"SPARK_LOG_DIR": str(tmp_path / "logs"), "SPARK_PID_DIR": str(tmp_path)},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        until(process, log, r"Spark Connect server started")
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def of_spark(place: Path) -> dict[str, str]:
    """The environment of a program of Spark whose files are below `place`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "PYSPARK"))}
    here = {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(place / "local")}
    return inherited | here


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


def executors() -> list[psutil.Process]:
    """The executors of the cluster: Java below this process's workers."""
    below = psutil.Process().children(recursive=True)
    return [one for one in below if "CoarseGrainedExecutorBackend" in " ".join(_command(one))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.mark.timeout(600)
def test_a_lost_executor_fails_no_run(faulty: str, cluster: str, tmp_path: Path) -> None:
    """The executor that computed the joins is killed before the rules read them; the worker starts another one."""
    assert prove(faulty, "--day", days_ago(5)) == 3
    here = outcome(faulty)
    forget(faulty)
    program = (sys.executable, "-m", "spark.jobs.reconcile")
    started = start_proof(faulty, tmp_path, "--day", days_ago(5), "--master", cluster, program=program)
    assert started.stderr is not None
    assert any('"stage": "join"' in line for line in started.stderr)
    [executor] = executors()
    executor.kill()
    assert ended(started) == 3
    assert outcome(faulty) == here


@pytest.mark.timeout(600)
def test_a_connect_server_finds_the_same(faulty: str, connect_server: str, tmp_path: Path) -> None:
    """The program has no Java: the server's executors read the database and the ledger, and write the findings."""
    ledger = tmp_path / "ledger" / "of the shop.csv"
    ledger.parent.mkdir()
    [known] = rows(faulty, "select min(transaction_id::text) as id from op where verdict = 1")
    ledger.write_text(f"transaction_id,verdict\n{known['id']},commit\n{known['id'][:-4]}ffff,commit\n")
    options = ("--day", days_ago(5), "--producer-ledger", ledger.parent)
    assert prove(faulty, *options, "--out", tmp_path / "here") == 3
    here = outcome(faulty)
    assert {found["kind"] for found in here[0]} == {"published_after_rollback", "ledger_not_sent"}
    forget(faulty)
    with psycopg.connect(faulty) as db:
        db.execute("truncate day_certificate")
    no_java = {"SPARK_REMOTE": connect_server, "JAVA_HOME": str(tmp_path / "none"), "PATH": "/usr/bin/none"}
    started = start_proof(faulty, tmp_path, *options, "--out", tmp_path / "there", **no_java)
    assert ended(started) == 3
    assert outcome(faulty) == here
    assert engine(faulty) == connect_server
    assert certified(tmp_path / "there") == certified(tmp_path / "here")
    names = [sorted(path.name for path in (tmp_path / out).iterdir()) for out in ("here", "there")]
    assert names == [["certificates", "findings", "report.html"]] * 2


def certified(out: Path) -> Any:
    """The digests of rows and findings in the certificate that a run wrote."""
    body = json.loads((out / "certificates" / f"{days_ago(5)}.json").read_text())["certificate"]
    return {name: body[name] for name in ("tables", "findings", "root", "counts")}
