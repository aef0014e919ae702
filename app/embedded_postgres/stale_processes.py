"""Clean up after an earlier run: a server that outlived its service, orphans, a stale postmaster.pid."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import structlog

from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.paths import ServerPaths
from app.embedded_postgres.shutdown import await_end, has_ended, kill_all, stop_server

# Backends notice within milliseconds that their postmaster is gone, unless they run a long computation.
_ORPHANS_LEAVE_WITHIN_S = 5.0
# The largest difference between the start time in postmaster.pid and the operating system's.
_START_TOLERANCE_S = 5.0
_NAMESPACES = ("mnt", "pid")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PidFile:
    """The contents of postmaster.pid: the server's pid, start (Unix seconds), port and status."""

    pid: int
    started: int
    port: int
    status: str

    @classmethod
    def read(cls, pgdata: Path) -> "PidFile | None":
        """Read the file; None if it is missing or incomplete (Postgres writes it in steps)."""
        try:
            lines = (pgdata / "postmaster.pid").read_text().splitlines()
            return cls(int(lines[0]), int(lines[2]), int(lines[3]), lines[7].strip() if len(lines) > 7 else "")
        except (FileNotFoundError, IndexError, ValueError):
            return None


def postmasters_of(paths: ServerPaths) -> list[psutil.Process]:
    """Return the living postmasters of this cluster: at most one, and perhaps a backend that it just forked."""
    return [process for process, arguments in _postgres_processes(paths) if str(paths.pgdata) in arguments]


def backends_of(paths: ServerPaths) -> list[psutil.Process]:
    """Return the living server processes of this cluster under a postmaster, or orphaned by its death.

    Their titles identify them: every user may read titles, and root in a container may not read working directories.
    """
    title = f"postgres: {paths.cluster_name}: "
    return [process for process, arguments in _postgres_processes(paths) if arguments[0].startswith(title)]


def _postgres_processes(paths: ServerPaths) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield the servers, with their arguments, that may be this cluster's."""
    for process in psutil.process_iter(["name", "cmdline"]):
        arguments = process.info["cmdline"]
        if (
            arguments
            and _is_postgres(process.info["name"])
            and _may_signal(process.pid)
            and not _is_of_another_container(process.pid, paths.pgdata)
        ):
            yield process, arguments


def _may_signal(pid: int) -> bool:
    """Return whether this user may end the process; one that it may not end is another user's."""
    if sys.platform != "win32":
        try:
            os.kill(pid, 0)
        except PermissionError:
            return False
        except ProcessLookupError:
            return False
    return True


def _is_of_another_container(pid: int, pgdata: Path) -> bool:
    """Return whether the process sees other mounts or pids than this one, so that our path may name another directory.

    A service's next start may have other mounts (systemd's PrivateTmp), so a server that works in `pgdata` is ours.
    """
    try:
        if all(os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMESPACES):
            return False
        return not os.path.samefile(f"/proc/{pid}/cwd", pgdata)
    except OSError:
        # Only Linux shows this, and root in a container may not read it of other users.
        return False


def _is_postgres(name: str | None) -> bool:
    return (name or "").removesuffix(".exe") == "postgres"


def clear(paths: ServerPaths) -> None:
    """End the processes of an earlier server of this cluster and remove a stale postmaster.pid.

    Only for the owner of the cluster. A server that outlived its service is stopped and not adopted: so each run has
    its own binaries and settings, the dead service's sessions and locks end, and the server is always a child of this
    process. That costs a second, only after a `kill -9`. Raises EmbeddedPostgresError.
    """
    for postmaster in postmasters_of(paths):
        _log.warning("embedded_postgres_survivor_stopped", pid=postmaster.pid, pgdata=str(paths.pgdata))
        stop_server(postmaster)
    kill_all(await_end(backends_of(paths), _ORPHANS_LEAVE_WITHIN_S))
    _remove_stale_pid_file(paths.pgdata)


def _remove_stale_pid_file(pgdata: Path) -> None:
    """Remove a postmaster.pid whose pid now belongs to another program; Postgres would take it for a running server.

    Postgres itself handles a file whose pid is gone, and checks that the old shared memory is unused.
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
            # A second server on one cluster would destroy it, so in doubt nothing is removed.
            raise EmbeddedPostgresError(
                f"{pid_file} names process {noted.pid}, a Postgres server started when the file says, but running on "
                "another directory. Was the cluster moved or copied while it ran? Stop that server and start again."
            )
    pid_file.unlink()
    _log.warning("embedded_postgres_stale_pid_file_removed", pid=noted and noted.pid, pgdata=str(pgdata))
