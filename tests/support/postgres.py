"""One embedded Postgres for a whole pytest run, shared by all xdist workers and started when a test first needs it.

A pytest plugin (`pytest_plugins = ["tests.support.postgres"]` in conftest.py): the controller starts a keeper, a
separate program that starts the server on demand and stops it when the controller's end of a pipe closes. The pipe
closes however pytest ends, also by `kill -9`, so no server is left behind; if the keeper was killed too, the next run
cleans up.
"""

import atexit
import contextlib
import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg
import pytest
from psycopg import sql

from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.embedded_postgres.lock import Ownership
from app.embedded_postgres.paths import find_paths
from app.embedded_postgres.shutdown import kill_server
from app.embedded_postgres.stale_processes import clear, postmasters_of
from tests.support import shared_servers

SETTINGS = {
    # Only here: the tests' rows are worthless after a power cut. Tests of crashes start servers of their own.
    "fsync": "off",
    "wal_compression": "off",
    "max_connections": "300",
    # Its files may be in memory.
    "max_wal_size": "512MB",
}

# A database for each test is copied ten times faster in memory than on disk, where there is room for it.
_IN_MEMORY = Path("/dev/shm")
_ROOM_BYTES = 6 * 2**30

# A condition on `pg_locks`, which shows those of all databases of the run's server. Waits for rows have no database.
IN_THIS_DATABASE = "database = (select oid from pg_database where datname = current_database())"

# The run's directory, for the workers. Not HALFNOTE_…: services that tests start do not inherit these.
RUN = "TESTS_RUN"
_WAIT_S = 120.0
_keepers: dict[pytest.Config, subprocess.Popen[bytes]] = {}


@dataclass(frozen=True)
class SharedServer:
    """The run's server; `url` is of its database `halfnote`, `programs` the directory of psql and the like."""

    url: str
    programs: Path

    def bin(self, name: str) -> Path:
        """Return the path of a program, as EmbeddedPostgres.bin does."""
        return self.programs / name


def pytest_configure(config: pytest.Config) -> None:
    """In the controller (or the only process): makes the run's directory and starts its keeper."""
    if hasattr(config, "workerinput"):
        return
    _sweep()
    # Its name contains the process id. The server's unprivileged user must be able to enter it.
    run = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-", dir=_parent()))
    run.chmod(0o755)
    os.environ[RUN] = str(run)
    _keepers[config] = subprocess.Popen(
        [sys.executable, "-m", "tests.support.postgres", str(run)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Ctrl-C ends pytest, and the end of pytest ends the keeper.
        start_new_session=True,
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """Waits until the keeper has stopped the server and removed the run's directory."""
    keeper = _keepers.pop(config, None)
    if keeper is not None:
        keeper.communicate()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """Yield a HALFNOTE_DATA_DIR for a server of one test. As root, the server's user can reach it (pytest's tmp_path
    it cannot). Servers that still run on it at the end of the test are killed."""
    directory = Path(tempfile.mkdtemp(prefix="halfnote-test-")).resolve()
    directory.chmod(0o755)
    data_dir = directory / "halfnote"
    link = _run() / "data-dirs" / directory.name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(directory)
    yield data_dir
    if data_dir.exists():
        for postmaster in postmasters_of(find_paths(data_dir)):
            kill_server(postmaster)
    shutil.rmtree(directory)
    link.unlink()


def server() -> SharedServer:
    """Return the run's server, and start it if it does not run yet."""
    run = _run()
    (run / "wanted").touch()
    url, programs = _await_result(run / "server").splitlines()
    return SharedServer(url, Path(programs))


def create_database(template: str | None = None, *, encoding: str | None = None) -> str:
    """Creates a database, a copy of `template` or of an encoding if one is named; returns its url."""
    name = f"t_{secrets.token_hex(8)}"
    if encoding is not None:
        _execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE_PROVIDER libc LOCALE 'C'")
        return _url_of(name)
    # Copying files beats writing them through the WAL as long as nothing is synced.
    _execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template} STRATEGY file_copy" if template else ""))
    return _url_of(name)


def drop_database(url: str) -> None:
    """Drops the database and ends its sessions."""
    _execute(f"DROP DATABASE IF EXISTS {urlsplit(url).path[1:]} WITH (FORCE)")


def ensure_template(name: str, build: Callable[[str], object], *, template: str | None = None) -> str:
    """Create the database `name`, a copy of `template` if one is named, and fill it by `build(url)`; once in a run."""

    def work() -> str:
        _execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template} STRATEGY file_copy" if template else ""))
        build(_url_of(name))
        return name

    return once(f"template-{name}", work)


def once(name: str, work: Callable[[], str]) -> str:
    """Return the result of `work`, which the first caller of this run executes; other workers wait for it."""
    place = _run() / name
    try:
        place.mkdir()
    except FileExistsError:
        return _await_result(place)
    return _keep_result(place, work)


def _keep_result(place: Path, work: Callable[[], str]) -> str:
    try:
        result = work()
    except BaseException:
        (place / "failed").write_text(traceback.format_exc())
        raise
    (place / "result.new").write_text(result)
    (place / "result.new").rename(place / "result")
    return result


def _await_result(place: Path) -> str:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if (place / "result").exists():
            return (place / "result").read_text()
        if (place / "failed").exists():
            raise RuntimeError((place / "failed").read_text())
        time.sleep(0.01)
    raise TimeoutError(f"{place.name} was not there within {_WAIT_S:g} s")


def _run() -> Path:
    return Path(os.environ[RUN])


def _url_of(database: str) -> str:
    return urlunsplit(urlsplit(server().url)._replace(path=f"/{database}"))


def _execute(statement: str) -> None:
    _connection().execute(statement.encode())


@functools.cache
def _connection() -> psycopg.Connection:
    """Return this process's connection to the run's server: a login costs more than most statements."""
    connection = psycopg.connect(server().url, autocommit=True)
    atexit.register(connection.close)
    return connection


def _parent() -> Path:
    """Return where to create the run's directory: in memory, if there is room and twice that much is available."""
    if _IN_MEMORY.is_dir() and os.access(_IN_MEMORY, os.W_OK):
        room = min(shutil.disk_usage(_IN_MEMORY).free, psutil.virtual_memory().available // 2)
        if room >= _ROOM_BYTES:
            return _IN_MEMORY
    return Path(tempfile.gettempdir())


def _prefix() -> str:
    return f"halfnote-tests-{os.getuid() if hasattr(os, 'getuid') else 0}-"


def _sweep() -> None:
    """Removes what runs with a killed keeper left; a keeper that still runs holds the lock."""
    left = [run for parent in (Path(tempfile.gettempdir()), _IN_MEMORY) for run in parent.glob(f"{_prefix()}*")]
    for run in left:
        if psutil.pid_exists(int(run.name.removeprefix(_prefix()).split("-")[0])):
            continue
        home = run / "server" / "postgres"
        shared_servers.end_all(run)
        try:
            if home.is_dir():
                ownership = Ownership.acquire(home / "lock", data_dir=run)
                clear(find_paths(run / "server"))
                ownership.release()
        except EmbeddedPostgresError:
            continue
        shutil.rmtree(run, ignore_errors=True)


def _keep(run: Path) -> None:
    """Run the keeper: start the server on demand, stop it when the controller has ended."""
    gone = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        gone.set()

    threading.Thread(target=watch, daemon=True).start()
    while not gone.wait(0.02):
        if (run / "wanted").exists():
            _serve(run, gone)
    _end_interrupted_tests(run)
    shared_servers.end_all(run)
    shutil.rmtree(run)


def _end_interrupted_tests(run: Path) -> None:
    """End what interrupted tests left: the processes of the run, and Postgres in `data_dir`s."""
    for process in psutil.process_iter():
        # A Postgres overwrites its environment, so it is found by its directory.
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(RUN) == str(run):
                process.kill()
    for link in (run / "data-dirs").glob("*"):
        directory = link.resolve()
        if (directory / "halfnote").exists():
            for postmaster in postmasters_of(find_paths(directory / "halfnote")):
                kill_server(postmaster)
        shutil.rmtree(directory, ignore_errors=True)


def _serve(run: Path, gone: threading.Event) -> None:
    place = run / "server"
    place.mkdir()
    running: list[EmbeddedPostgres] = []

    def start() -> str:
        running.append(EmbeddedPostgres.start(place, settings=SETTINGS))
        _hash_password_quickly(running[0].url)
        return f"{running[0].url}\n{running[0].bin('psql').parent}"

    _keep_result(place, start)
    gone.wait()
    running[0].stop()
    shutil.rmtree(running[0].log_dir.parent)  # elsewhere if the temporary directory is closed to the server's user


def _hash_password_quickly(url: str) -> None:
    """Store the password with 1,000 rounds of hashing instead of 4,096: each test opens several connections.

    The Go driver `lib/pq` refuses a count of fewer than four digits.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET scram_iterations = 1000")
        user, password = connection.info.user, connection.info.password
        connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(user), sql.Literal(password)))


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
