"""What an earlier run left behind in a cluster: a server that outlived its service, orphans, a stale postmaster.pid."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from app.embedded.errors import EmbeddedPostgresError
from app.embedded.place import Place
from app.embedded.shutdown import await_end, has_ended, kill_all, stop_server

# Backends notice within milliseconds that their postmaster is gone, unless they are amid a long computation.
_ORPHANS_LEAVE_WITHIN_S = 5.0
# How far the start that postmaster.pid notes may be from the one that the operating system tells.
_START_TOLERANCE_S = 5.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PidFile:
    """What postmaster.pid says: who the server is (`started` in Unix seconds), where, and how far it has come."""

    pid: int
    started: int
    port: int
    status: str

    @classmethod
    def read(cls, pgdata: Path) -> "PidFile | None":
        """Reads it; None if there is none or it is cut short (Postgres writes it in steps)."""
        try:
            lines = (pgdata / "postmaster.pid").read_text().splitlines()
            return cls(int(lines[0]), int(lines[2]), int(lines[3]), lines[7].strip() if len(lines) > 7 else "")
        except (FileNotFoundError, IndexError, ValueError):
            return None


def postmasters_of(place: Place) -> list[psutil.Process]:
    """The living postmasters of this cluster: at most one, and perhaps a backend that it just forked."""
    return [process for process, arguments in _postgres_processes() if str(place.pgdata) in arguments]


def backends_of(place: Place) -> list[psutil.Process]:
    """The living server processes of this cluster under a postmaster, or orphaned by its death.

    They are known by their titles, which anyone may read; root in a container may not read working directories.
    """
    title = f"postgres: {place.cluster_name}: "
    return [process for process, arguments in _postgres_processes() if arguments[0].startswith(title)]


def _postgres_processes() -> Iterator[tuple[psutil.Process, list[str]]]:
    for process in psutil.process_iter(["name", "cmdline"]):
        arguments = process.info["cmdline"]
        if arguments and _is_postgres(process.info["name"]):
            yield process, arguments


def _is_postgres(name: str | None) -> bool:
    return (name or "").removesuffix(".exe") == "postgres"


def clear(place: Place) -> None:
    """Ends what is left of an earlier server of this cluster and removes a stale postmaster.pid.

    Only for the owner of the cluster. A server that outlived its service is stopped rather than adopted: so each run
    has the binaries and settings it asked for, the dead service's sessions and their locks end, and the server is
    always our own child. That costs a second, after a `kill -9` only. Raises EmbeddedPostgresError.
    """
    for postmaster in postmasters_of(place):
        _log.warning("embedded_postgres_survivor_stopped", pid=postmaster.pid, pgdata=str(place.pgdata))
        stop_server(postmaster)
    kill_all(await_end(backends_of(place), _ORPHANS_LEAVE_WITHIN_S))
    _remove_stale_pid_file(place.pgdata)


def _remove_stale_pid_file(pgdata: Path) -> None:
    """Removes a postmaster.pid whose pid now belongs to something else, which Postgres takes for a running server.

    One whose pid is gone is left to Postgres, which also checks that the old shared memory is out of use.
    """
    pid_file = pgdata / "postmaster.pid"
    if not pid_file.exists():
        return
    noted = PidFile.read(pgdata)
    if noted is not None:
        try:
            other = psutil.Process(noted.pid)
            started, name = other.create_time(), other.name()
        except psutil.NoSuchProcess:
            return
        if _is_postgres(name) and abs(started - noted.started) <= _START_TOLERANCE_S and not has_ended(other):
            # A second server on one cluster would destroy it, so where there is doubt nothing is removed.
            raise EmbeddedPostgresError(
                f"{pid_file} names process {noted.pid}, a Postgres server started when the file says, but running on "
                "another directory. Was the cluster moved or copied while it ran? Stop that server and start again."
            )
    pid_file.unlink()
    _log.warning("embedded_postgres_stale_pid_file_removed", pid=noted and noted.pid, pgdata=str(pgdata))
