"""The embedded Postgres server of a service: start, restart, stop."""

import contextlib
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import psutil
import structlog

from app.embedded_postgres.binaries import Installation, clean_environment, find_installation, runnable_by
from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.foreign import refuse_foreign
from app.embedded_postgres.initdb import DATABASE, USER, ensure_cluster, read_password, write_settings
from app.embedded_postgres.location import record_owner
from app.embedded_postgres.lock import Ownership
from app.embedded_postgres.paths import ServerPaths, find_paths
from app.embedded_postgres.ports import HOST, free_port, is_free, remember_port, remembered_port
from app.embedded_postgres.postmaster import ServerEndedError, launch
from app.embedded_postgres.shutdown import has_ended, kill_server, stop_server
from app.embedded_postgres.stale_processes import clear

_PORTS_TRIED = 5
_CREATE_DATABASE = r"""
SELECT format('CREATE DATABASE %I', :'name') WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'name') \gexec
"""

_log = structlog.get_logger(__name__)


class EmbeddedPostgres:
    """A Postgres server that this process owns, on 127.0.0.1 only."""

    url: str
    data_dir: Path

    def __init__(
        self,
        *,
        data_dir: Path,
        url: str,
        paths: ServerPaths,
        ownership: Ownership,
        running: tuple[Installation, psutil.Process],
    ) -> None:
        self.data_dir = data_dir
        self.url = url
        self.log_dir = paths.log
        self._paths = paths
        self._ownership = ownership
        self._installation, self._postmaster = running
        # A stop during a restart would miss the new server and leave it running.
        self._turn = threading.Lock()

    @classmethod
    def start(
        cls,
        data_dir: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        patience_s: float = 300.0,
    ) -> "EmbeddedPostgres":
        """Make the cluster unless it exists, start its server and wait until it takes connections. Blocks.

        `port`: by default the last run's if it is free, else any free one. `settings`: override our lines of
        postgresql.conf. `patience_s`: how long a crash recovery may log no progress. Raises EmbeddedPostgresError,
        whose text says what to do.
        """
        began = time.monotonic()
        data_dir = data_dir.resolve()
        try:
            server = cls._start(data_dir, port, settings or {}, patience_s)
        except OSError as error:
            raise EmbeddedPostgresError(
                f"The embedded Postgres cannot use {data_dir}: {error}. Make it usable for this user (and for the "
                "server's, if you are root), choose another HALFNOTE_DATA_DIR, or set HALFNOTE_DATABASE_URL."
            ) from error
        _log.info(
            "embedded_postgres_started",
            data_dir=str(data_dir),
            pid=server.pid,
            log=str(server.log_dir),
            duration_ms=round((time.monotonic() - began) * 1000),
        )
        return server

    @classmethod
    def _start(
        cls, data_dir: Path, port: int | None, settings: Mapping[str, str], patience_s: float
    ) -> "EmbeddedPostgres":
        refuse_foreign(data_dir)
        paths = find_paths(data_dir)
        with contextlib.ExitStack() as undo:
            ownership = Ownership.acquire(paths.home / "lock", data_dir=data_dir)
            undo.callback(ownership.release)
            record_owner(paths.home, data_dir)
            installation = runnable_by(paths.account, find_installation(), paths.home)
            ensure_cluster(paths, installation, sync=settings.get("fsync") != "off")
            clear(paths)
            port, postmaster = _launch_on_a_port(paths, installation, port, settings, patience_s)
            undo.callback(stop_server, postmaster)
            password = read_password(paths)
            _ensure_database(installation, port, password)
            remember_port(paths.home, port)
            undo.pop_all()
        return cls(
            data_dir=data_dir,
            url=f"postgresql://{USER}:{quote(password, safe='')}@{HOST}:{port}/{DATABASE}",
            paths=paths,
            ownership=ownership,
            running=(installation, postmaster),
        )

    @property
    def home(self) -> Path:
        """The directory of the cluster and the server's log, which may be outside of the data directory."""
        return self._paths.home

    @property
    def pid(self) -> int:
        """The postmaster's pid."""
        return self._postmaster.pid

    def bin(self, name: str) -> Path:
        """Return the path of a program of the same Postgres, such as `psql` or `pg_dump`."""
        return self._installation.bin(name)

    def alive(self) -> bool:
        """Return whether the postmaster runs; its backends may still be in crash recovery."""
        return not has_ended(self._postmaster)

    def restart(self, *, patience_s: float = 300.0) -> None:
        """Start the server again after its postmaster died, on the same port and with the same settings. Blocks.

        Does nothing while it is alive, or after `stop` or `kill`. Raises EmbeddedPostgresError.
        """
        with self._turn:
            if self._ownership.held and not self.alive():
                clear(self._paths)
                self._postmaster = launch(self._paths, self._installation, patience_s=patience_s)

    def stop(self) -> None:
        """Shut the server down and wait for its end. A second call does nothing."""
        with self._turn:
            stop_server(self._postmaster)
            self._ownership.release()

    def kill(self) -> None:
        """Send SIGKILL to the postmaster and every backend, as in a crash, and wait for their end."""
        with self._turn:
            kill_server(self._postmaster)
            self._ownership.release()


def _launch_on_a_port(
    paths: ServerPaths, installation: Installation, port: int | None, settings: Mapping[str, str], patience_s: float
) -> tuple[int, psutil.Process]:
    """Start the server on `port`, or on the first port that works; return port and postmaster.

    Another program may take a port between the check and the server's bind; then, unless `port` is given, the next port
    is tried.
    """
    if port is not None and not is_free(port):
        raise EmbeddedPostgresError(
            f"Port {port} on {HOST} is taken. Stop the program that listens there, or let Halfnote choose a port."
        )
    for remaining in reversed(range(_PORTS_TRIED)):
        chosen = port or remembered_port(paths.home) or free_port()
        write_settings(paths, chosen, settings)
        try:
            return chosen, launch(paths, installation, patience_s=patience_s)
        except ServerEndedError:
            if port is not None or remaining == 0 or is_free(chosen):
                raise
    raise AssertionError("unreachable: the last try returns or raises")


def _ensure_database(installation: Installation, port: int, password: str) -> None:
    """Log in with the password, which proves that the server is usable; create the database on the first run."""
    connection = {
        "PGHOST": HOST,
        "PGPORT": str(port),
        "PGUSER": USER,
        "PGDATABASE": "postgres",
        "PGPASSWORD": password,
    }
    outcome = subprocess.run(  # noqa: S603 - our own program and options
        [installation.bin("psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", f"name={DATABASE}"],
        # In the environment: every user of the machine can read a program's arguments.
        env=clean_environment() | connection,
        input=_CREATE_DATABASE,
        capture_output=True,
        text=True,
    )
    if outcome.returncode != 0:
        raise EmbeddedPostgresError(
            f"The embedded Postgres started but refuses the login: {outcome.stderr.strip()} Restore the password "
            "file beside its data, or choose another HALFNOTE_DATA_DIR."
        )
