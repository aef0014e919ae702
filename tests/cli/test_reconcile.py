"""`halfnote reconcile` and `findings`: options passed to the Spark program, refusals, and lists."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.cli import spark_program
from app.cli.errors import Refusal
from app.database.connection import connect
from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.embedded_postgres.attach import borrowed
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.stale_processes import postmasters_of
from app.migrate import migrate
from tests.support.cli_runs import Run, run, run_alone
from tests.support.processes import ROOT, Service
from tests.support.proof_runs import AT, DAY, ID, find, find_many, resolve

__all__ = ["run", "run_alone"]

# Replaces the Spark program in tests of how it starts and ends; tests/spark runs the real one.
PROGRAM = """
import json, os, signal, subprocess, sys, time
if "--leaves" in sys.argv:
    # The child inherits stdout, so a reader sees its end only after both processes have ended.
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    sys.exit(0)
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
    if "--ends" in sys.argv:
        sys.exit(130)
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
several = os.environ.get("HALFNOTE_DATABASE_URLS")
print(json.dumps([sys.argv[1:], os.environ.get("HALFNOTE_DATABASE_URL"), *([several] if several else [])]), flush=True)
while "--stay" in sys.argv:
    time.sleep(0.01)
if "--killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[sys.argv.index("--status") + 1]) if "--status" in sys.argv else 0)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a command whose Spark program is the one above."""
    jobs = tmp_path / "spark" / "jobs"
    jobs.mkdir(parents=True)
    (jobs.parent / "__init__.py").touch()
    (jobs / "__init__.py").touch()
    (jobs / "reconcile.py").write_text(PROGRAM)
    options = tmp_path / "spark" / "options"
    options.mkdir()
    (options / "__init__.py").touch()
    (options / "__main__.py").write_text(PROGRAM)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "HALFNOTE_DATA_DIR": str(tmp_path / "none")}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "app.cli", "reconcile", *arguments]


def reconcile(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True)


def started(environment: dict[str, str], *arguments: str) -> "subprocess.Popen[str]":
    """Start the command and wait until its program runs."""
    process = subprocess.Popen(command(*arguments), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("[")
    return process


@pytest.mark.parametrize("status", [0, 1, 2, 3])
def test_options_and_the_exit_status_are_passed_on(environment: dict[str, str], dsn: str, status: int) -> None:
    options = ["--day", "2026-11-20", "--sla-s=60", "--out", "-", "--status", str(status), "--", "-x"]
    ended = reconcile({**environment, "HALFNOTE_DATABASE_URL": dsn}, *options)
    assert ended.returncode == status, ended.stderr
    passed, url = json.loads(ended.stdout)
    assert [one for one in passed if one != "--"] == [one for one in options if one != "--"]
    assert url == dsn


@pytest.mark.parametrize("form", [("--database-url", "{}"), ("--database-url={}",), ("--data", "{}")])
def test_the_url_goes_by_the_environment_alone(environment: dict[str, str], dsn: str, form: tuple[str, ...]) -> None:
    ended = reconcile(environment, "--sla-s", "60", *(part.format(dsn) for part in form), "--keep-staging")
    assert json.loads(ended.stdout) == [["--sla-s", "60", "--keep-staging"], dsn]
    assert reconcile(environment, "--database-url").returncode == 2


@pytest.mark.parametrize("given", [("eu=postgresql://a/x", "postgresql://b/us"), ("eu=postgresql://a/x",)])
def test_several_databases_go_by_the_environment_alone(environment: dict[str, str], given: tuple[str, ...]) -> None:
    options = [word for url in given for word in ("--database-url", url)]
    ended = reconcile({**environment, "HALFNOTE_DATABASE_URL": "postgresql://c/z"}, "--sla-s", "60", *options)
    assert json.loads(ended.stdout.splitlines()[0])[0] == ["--sla-s", "60"]
    assert json.loads(ended.stdout.splitlines()[0])[2] == "\n".join(given)
    # Those of the environment are used if no option names a database.
    ended = reconcile({**environment, "HALFNOTE_DATABASE_URLS": "\n".join(given)}, "--sla-s", "60")
    assert json.loads(ended.stdout.splitlines()[0])[2] == "\n".join(given)


def test_help_is_the_programs_own_and_needs_no_database(environment: dict[str, str]) -> None:
    ended = reconcile(environment, "--help")
    assert (ended.returncode, json.loads(ended.stdout)[0]) == (0, ["reconcile", "--help"])


def test_over_parquet_no_database_is_asked(environment: dict[str, str], tmp_path: Path) -> None:
    ended = reconcile(environment, "--from-parquet", str(tmp_path))
    assert (ended.returncode, json.loads(ended.stdout)) == (0, [["--from-parquet", str(tmp_path)], None])


def test_a_killed_program_gives_the_exit_status_of_a_shell(environment: dict[str, str], dsn: str) -> None:
    assert reconcile({**environment, "HALFNOTE_DATABASE_URL": dsn}, "--killed").returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "passed"),
    [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGTERM")],
)
def test_signals_are_passed_on(environment: dict[str, str], dsn: str, number: signal.Signals, passed: str) -> None:
    process = started({**environment, "HALFNOTE_DATABASE_URL": dsn}, "--stay", "--ends")
    process.send_signal(number)
    printed, _ = process.communicate(timeout=60)
    assert (printed.split(), process.returncode) == ([passed], 130)


def test_a_hangup_that_nohup_ignores_stays_ignored(environment: dict[str, str], dsn: str) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = started({**environment, "HALFNOTE_DATABASE_URL": dsn}, "--stay", "--ends")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    # The later signal alone reaches the program.
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert (printed.split(), process.returncode) == (["SIGINT"], 130)


def test_processes_that_the_program_leaves_end_with_it(environment: dict[str, str], dsn: str) -> None:
    ended = reconcile({**environment, "HALFNOTE_DATABASE_URL": dsn}, "--leaves")
    left = int(ended.stdout)
    assert ended.returncode == 0
    while not gone(left):
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Return whether a process has ended; the dead may still be in the table."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ctrl_c_on_a_terminal_reaches_the_program_once(environment: dict[str, str], dsn: str) -> None:
    process = started({**environment, "HALFNOTE_DATABASE_URL": dsn}, "--stay")
    children = subprocess.run(["ps", "-o", "pid=,pgid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    [(child, group)] = [tuple(map(int, line.split())) for line in children.stdout.splitlines()]
    # A terminal signals the group in front, the command's own, and the program is in another.
    assert child == group != os.getpgid(process.pid)
    os.kill(child, signal.SIGKILL)
    process.communicate(timeout=60)


def test_a_database_that_is_behind_is_refused(environment: dict[str, str], dsn: str) -> None:
    async def set_back() -> None:
        connection = await connect(dsn)
        await connection.execute("update alembic_version set version_num = '0006'")
        await connection.close()

    asyncio.run(set_back())
    ended = reconcile({**environment, "HALFNOTE_DATABASE_URL": dsn})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "halfnote migrate" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_no_database_is_refused_and_none_is_made(environment: dict[str, str], tmp_path: Path) -> None:
    ended = reconcile(environment)
    assert ended.returncode == 1
    assert "There is no database in" in ended.stderr
    assert not (tmp_path / "none").exists()
    unreachable = {**environment, "HALFNOTE_DATABASE_URL": "postgresql://halfnote:secret@127.0.0.1:9/none"}
    ended = reconcile(unreachable)
    assert ended.returncode == 1
    assert "cannot be used" in ended.stderr
    assert "secret" not in ended.stderr


def test_the_running_services_database_is_used_and_left_alone(environment: dict[str, str], data_dir: Path) -> None:
    service = Service(data_dir, "serve")
    asyncio.run(service.start())
    try:
        [before] = postmasters_of(find_paths(data_dir))
        ended = reconcile({**environment, "HALFNOTE_DATA_DIR": str(data_dir)})
        assert ended.returncode == 0, ended.stderr
        passed, url = json.loads(ended.stdout)
        assert passed == []
        assert asyncio.run(revision(url)) is not None
        assert [one.pid for one in postmasters_of(find_paths(data_dir))] == [before.pid]
        assert service.process is not None
        assert service.process.poll() is None
    finally:
        assert service.stop() == 0


async def revision(url: str) -> Any:
    connection = await connect(url)
    try:
        return await connection.fetchval("select version_num from alembic_version")
    finally:
        await connection.close()


@pytest.fixture
def resting(data_dir: Path) -> Path:
    """The data directory of a service that was here and is stopped."""
    server = EmbeddedPostgres.start(data_dir, settings={"fsync": "off"})
    asyncio.run(migrate(server.url, days_ahead=1))
    server.stop()
    return data_dir


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_resting_database_is_started_for_the_run(
    environment: dict[str, str], resting: Path, number: signal.Signals
) -> None:
    process = started({**environment, "HALFNOTE_DATA_DIR": str(resting)}, "--stay", "--ends")
    assert len(postmasters_of(find_paths(resting))) == 1
    # Other users find it meanwhile.
    with borrowed(resting) as url:
        assert asyncio.run(revision(url)) is not None
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert postmasters_of(find_paths(resting)) == []
    with borrowed(resting) as url:
        assert asyncio.run(revision(url)) is not None
    assert postmasters_of(find_paths(resting)) == []


def test_a_database_of_an_owner_that_never_gets_ready_is_given_up(resting: Path) -> None:
    server = EmbeddedPostgres.start(resting)
    (find_paths(resting).pgdata / "postmaster.pid").rename(resting / "aside")
    try:
        with pytest.raises(EmbeddedPostgresError, match="in use by another"), borrowed(resting, patience_s=0):
            pass
    finally:
        (resting / "aside").rename(find_paths(resting).pgdata / "postmaster.pid")
        server.stop()


def test_without_pyspark_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, run_alone: Run) -> None:
    monkeypatch.setattr(spark_program, "NEEDED", ("json", "no_such_package"))
    ended = run_alone("reconcile")
    assert (ended.code, ended.out) == (2, "")
    assert "no_such_package" in ended.err
    assert "pip install 'halfnote-server[spark]'" in ended.err


# Hides the packages of the extra `spark` from a Python that has them.
WITHOUT_EXTRA = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
HIDDEN = {"adbc_driver_postgresql", "jinja2", "matplotlib", "psycopg", "py4j", "pyarrow", "pyspark"}
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in HIDDEN else found(name, *rest)
"""


@pytest.mark.parametrize(
    "program", ["reconcile", *(pytest.param(name, marks=pytest.mark.slow) for name in ("archive", "restore", "redact"))]
)
def test_help_without_the_extra_lists_the_options_and_what_to_install(program: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRA)
    command = [sys.executable, "-m", "app.cli", program, "--help"]
    plain, hidden = (
        subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        for env in ({**os.environ, "COLUMNS": "80"}, {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(tmp_path)})
    )
    assert (plain.returncode, plain.stderr, hidden.returncode) == (0, "", 0)
    assert "--database-url" in plain.stdout
    assert hidden.stdout == plain.stdout
    said = " ".join(hidden.stderr.split())
    assert "needs pyspark, psycopg" in said
    assert "pip install 'halfnote-server[spark]'" in said


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make JAVA_HOME hold a `java` that says it is of this version."""

    def install(said: str) -> None:
        program = tmp_path / "bin" / "java"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\necho '{said}' >&2\n")
        program.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))

    return install


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('openjdk version "11.0.24" 2024-07-16', "is Java 11"),
        ('java version "1.8.0_421"', "is Java 8"),
        ("no idea", "does not print its version"),
    ],
)
def test_another_java_is_refused(java: Callable[[str], None], run_alone: Run, said: str, expected: str) -> None:
    java(said)
    ended = run_alone("reconcile")
    assert (ended.code, ended.out) == (2, "")
    assert expected in ended.err
    assert "Java 17" in ended.err
    assert "openjdk-17" in ended.err


@pytest.mark.parametrize("version", ["17.0.15", "21", "21.0.4"])
def test_java_17_and_newer_will_do(java: Callable[[str], None], version: str) -> None:
    java(f'openjdk version "{version}" 2025-04-15')
    spark_program.refuse_without_java()


def test_without_java_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refusal, match="no `java` on the PATH") as refused:
        spark_program.refuse_without_java()
    assert refused.value.code == 2
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(Refusal, match="cannot be run"):
        spark_program.refuse_without_java()


def test_behind_a_connect_server_no_java_is_needed() -> None:
    assert spark_program.runs_elsewhere([], {"SPARK_REMOTE": "sc://spark:15002"})
    assert spark_program.runs_elsewhere(["--master", "sc://spark:15002"], {})
    assert spark_program.runs_elsewhere(["--master=sc://spark"], {})
    assert not spark_program.runs_elsewhere(["--master", "spark://spark:7077", "--out", "sc"], {"SPARK_REMOTE": ""})


@pytest.fixture
def found(database: str) -> Iterator[dict[str, int]]:
    """Finding ids by subject; the findings are deleted after the test."""

    async def write() -> dict[str, int]:
        connection = await connect(database)
        ids = {
            ID: await find(connection, "parked", ID, transaction_id=ID, detail='{"reason": "15 checks"}'),
            "ordre": await find(connection, "unrouted", "ordre", detail='{"messages": 3}'),
            "shop": await find(connection, "verdict_refused", "shop", DAY - timedelta(days=60), resolved_at=AT),
        }
        await resolve(connection, "ordre")
        await connection.close()
        return ids

    async def forget() -> None:
        connection = await connect(database)
        await connection.execute("delete from finding")
        await connection.close()

    yield asyncio.run(write())
    asyncio.run(forget())


def test_findings_are_listed_and_shown(run: Run, found: dict[str, int]) -> None:
    for arguments in ((), ("list",), ("list", "--state", "open"), ("--day", str(DAY)), ("--kind", "parked")):
        listed = run("findings", *arguments)
        assert listed.code == 0, listed.err
        assert ID in listed.out
        assert "ordre" not in listed.out
    assert "unrouted (resolved)" in run("findings", "list", "--state", "resolved").out
    every = run("findings", "--state", "all", "--json").json
    assert [one["subject"] for one in every["items"]] == ["ordre", ID, "shop"]
    shown = run("findings", "show", str(found[ID])).out
    for expected in (ID, "15 checks", "2026-11-21 03:00:00 UTC, by run 1", "/findings/kinds/parked"):
        assert expected in shown
    resolved = run("findings", "show", str(found["ordre"]))
    assert "by run 2" in resolved.out
    removed = run("findings", "show", str(found["shop"]))
    assert "2026-11-21 03:00:00 UTC, when its day was removed" in " ".join(removed.out.split())
    assert run("findings", "show", str(found[ID]), "--json").json["transaction"] == f"/transactions/{ID}"


def test_findings_wrong_usage(run: Run, found: dict[str, int]) -> None:
    assert "There is no finding 999999999" in run("findings", "show", "999999999").err
    refused = run("findings", "list", "--kind", "lost")
    assert refused.code == 1
    assert "field: kind" in refused.err
    misplaced = run("findings", "--kind", "parked", "show", "1")
    assert misplaced.code == 2
    assert "after the command" in misplaced.err


def test_a_cut_list_prints_the_next_cursor(run: Run, database: str, found: dict[str, int]) -> None:
    async def more() -> None:
        connection = await connect(database)
        await find_many(connection, "half_stuck", 5)
        await connection.close()

    asyncio.run(more())
    first = run("findings", "list", "--limit", "4", "--json").json
    rest = run("findings", "list", "--cursor", first["next_cursor"], "--json").json
    assert len(first["items"]) == 4
    assert len({one["finding_id"] for one in first["items"] + rest["items"]}) == 6
    assert f"--cursor {first['next_cursor']}" in run("findings", "list", "--limit", "4").out
