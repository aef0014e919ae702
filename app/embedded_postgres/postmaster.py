"""Start the server process and wait until it takes connections."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from app.embedded_postgres.binaries import Installation, clean_environment
from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.full_disk import find_full_disk, find_used_up_quota
from app.embedded_postgres.initdb import last_lines
from app.embedded_postgres.paths import ServerPaths
from app.embedded_postgres.shutdown import has_ended, kill_server
from app.embedded_postgres.stale_processes import PidFile

_POLL_S = 0.02


class ServerEndedError(EmbeddedPostgresError):
    """The server ended while it was starting."""


def launch(paths: ServerPaths, installation: Installation, *, patience_s: float) -> psutil.Process:
    """Start the server and wait through crash recovery; return the postmaster, ready for connections.

    Waits while the server lives and its logs grow at least every `patience_s` seconds (Postgres logs its recovery every
    10 s). Raises ServerEndedError and EmbeddedPostgresError.
    """
    paths.log.mkdir(exist_ok=True, mode=0o700)
    paths.account.own(paths.log)
    written = _log_sizes(paths)
    postmaster = _spawn(paths, installation)
    try:
        _await_ready(postmaster, paths, patience_s, written)
    except BaseException:
        kill_server(postmaster)
        raise
    return postmaster


def _spawn(paths: ServerPaths, installation: Installation) -> psutil.Process:
    """Start the postmaster in a session of its own, so that a Ctrl-C for the service does not reach it first."""
    if sys.platform == "win32":
        return _spawn_on_windows(paths, installation)
    with _startup_log(paths).open("w") as output:
        return psutil.Popen(
            [str(installation.bin("postgres")), "-D", str(paths.pgdata)],
            user=paths.account.uid,
            group=paths.account.gid,
            extra_groups=paths.account.extra_groups,
            start_new_session=True,
            cwd=paths.home,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _spawn_on_windows(paths: ServerPaths, installation: Installation) -> psutil.Process:
    """Start with pg_ctl, which drops an administrator's rights as Postgres requires; postmaster.pid has the pid."""
    pg_ctl = [str(installation.bin("pg_ctl")), "-W", "-D", str(paths.pgdata), "-l", str(_startup_log(paths)), "start"]
    subprocess.run(pg_ctl, check=True, env=clean_environment(), stdin=subprocess.DEVNULL)  # noqa: S603
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        noted = PidFile.read(paths.pgdata)
        if noted is not None and psutil.pid_exists(noted.pid):
            return psutil.Process(noted.pid)
        time.sleep(_POLL_S)
    raise ServerEndedError(f"Postgres did not start. The end of its log:\n{_log_end(paths)}")


def _await_ready(postmaster: psutil.Process, paths: ServerPaths, patience_s: float, written: dict[Path, int]) -> None:
    """Wait until the server takes connections. `written`: the sizes of the log's files before the start."""
    grown_at, log_size = time.monotonic(), _log_size(paths)
    while True:
        # Postgres writes `ready` there when recovery is over and it accepts sessions.
        noted = PidFile.read(paths.pgdata)
        if noted is not None and noted.pid == postmaster.pid and noted.status == "ready":
            return
        if has_ended(postmaster):
            raise ServerEndedError(_why_ended(paths, written))
        size = _log_size(paths)
        if size != log_size:
            grown_at, log_size = time.monotonic(), size
        elif time.monotonic() - grown_at > patience_s:
            raise EmbeddedPostgresError(
                f"Postgres in {paths.home} made no progress for {patience_s:g} s while starting. Check the disk and "
                f"at its log in {paths.log}, then start again:\n{_log_end(paths)}"
            )
        time.sleep(_POLL_S)


def _why_ended(paths: ServerPaths, written: dict[Path, int]) -> str:
    startup_end, newest_end = _log_ends(paths)
    log_end = f"{startup_end}\n{newest_end}"
    disk = find_full_disk(paths.pgdata, log_end)
    if disk is not None:
        return (
            f"The disk {disk.mount} is full ({disk.free_bytes / 2**20:.0f} MB are free), so Postgres cannot start in "
            f"{paths.home}. Enlarge the disk, or delete what is not Postgres's; never delete files of {paths.pgdata}. "
            f"Postgres's log is in {paths.log}."
        )
    mount = find_used_up_quota(paths.pgdata, startup_end, _log_since(paths, written))
    if mount is not None:
        return (
            f"A disk quota on {mount} is used up, so Postgres cannot start in {paths.home}. Raise the quota, or delete "
            f"what is not Postgres's; never delete files of {paths.pgdata}. Postgres's log is in {paths.log}."
        )
    return (
        f"Postgres ended while it was starting in {paths.home}. The end of its log in {paths.log} says what to "
        f"repair:\n{log_end}"
    )


def _startup_log(paths: ServerPaths) -> Path:
    """Return the file of the output that bypasses the server's log collector."""
    return paths.home / "startup.log"


def _log_size(paths: ServerPaths) -> int:
    return sum(_log_sizes(paths).values())


def _log_sizes(paths: ServerPaths) -> dict[Path, int]:
    return {path: path.stat().st_size for path in paths.log.iterdir()}


def _log_since(paths: ServerPaths, written: dict[Path, int]) -> str:
    """Return the last lines that the server's log has got since its files had the sizes `written`.

    A file that is smaller now was truncated by the rotation.
    """
    newest = max(paths.log.glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        return ""
    before, content = written.get(newest, 0), newest.read_bytes()
    added = content[before:] if len(content) >= before else content
    return last_lines(added.decode(errors="replace"), 10)


def _log_end(paths: ServerPaths) -> str:
    return "\n".join(_log_ends(paths))


def _log_ends(paths: ServerPaths) -> tuple[str, str]:
    """Return the last lines of this start's own output, and of the server's log."""
    newest = max(paths.log.glob("*.log"), key=lambda path: path.stat().st_mtime, default=None)
    startup, log = (
        "" if path is None else last_lines(path.read_text(errors="replace"), 10)
        for path in (_startup_log(paths), newest)
    )
    return startup, log
