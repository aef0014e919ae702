"""Starts the server process and waits until it takes connections."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from app.embedded.cluster import last_lines
from app.embedded.errors import EmbeddedPostgresError
from app.embedded.installation import Installation, clean_environment
from app.embedded.place import Place
from app.embedded.shutdown import has_ended, kill_server
from app.embedded.survivors import PidFile

_POLL_S = 0.02


class ServerEndedError(EmbeddedPostgresError):
    """The server ended while it was starting."""


def launch(place: Place, installation: Installation, *, patience_s: float) -> psutil.Process:
    """Starts the server and waits through crash recovery; returns the postmaster, ready for connections.

    Waits as long as the server lives and its logs grow (Postgres reports on its recovery every 10 s) at least every
    `patience_s` seconds. Raises ServerEndedError, EmbeddedPostgresError.
    """
    place.log.mkdir(exist_ok=True, mode=0o700)
    place.account.own(place.log)
    postmaster = _spawn(place, installation)
    try:
        _await_ready(postmaster, place, patience_s)
    except BaseException:
        kill_server(postmaster)
        raise
    return postmaster


def _spawn(place: Place, installation: Installation) -> psutil.Process:
    """The postmaster as a child in a session of its own: a Ctrl-C meant for the service must not reach it first."""
    if sys.platform == "win32":
        return _spawn_on_windows(place, installation)
    with _startup_log(place).open("w") as output:
        return psutil.Popen(
            [str(installation.bin("postgres")), "-D", str(place.pgdata)],
            user=place.account.uid,
            group=place.account.gid,
            extra_groups=place.account.extra_groups,
            start_new_session=True,
            cwd=place.home,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _spawn_on_windows(place: Place, installation: Installation) -> psutil.Process:
    """By pg_ctl, which drops an administrator's rights as Postgres demands; postmaster.pid then tells the pid."""
    pg_ctl = [str(installation.bin("pg_ctl")), "-W", "-D", str(place.pgdata), "-l", str(_startup_log(place)), "start"]
    subprocess.run(pg_ctl, check=True, env=clean_environment(), stdin=subprocess.DEVNULL)  # noqa: S603
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        noted = PidFile.read(place.pgdata)
        if noted is not None and psutil.pid_exists(noted.pid):
            return psutil.Process(noted.pid)
        time.sleep(_POLL_S)
    raise ServerEndedError(f"Postgres did not start. The end of its log:\n{_log_end(place)}")


def _await_ready(postmaster: psutil.Process, place: Place, patience_s: float) -> None:
    grown_at, log_size = time.monotonic(), _log_size(place)
    while True:
        # Postgres itself writes `ready` there when recovery is over and sessions are let in.
        noted = PidFile.read(place.pgdata)
        if noted is not None and noted.pid == postmaster.pid and noted.status == "ready":
            return
        if has_ended(postmaster):
            raise ServerEndedError(
                f"Postgres ended while it was starting in {place.home}. The end of its log in {place.log}, which says "
                f"what to repair:\n{_log_end(place)}"
            )
        size = _log_size(place)
        if size != log_size:
            grown_at, log_size = time.monotonic(), size
        elif time.monotonic() - grown_at > patience_s:
            raise EmbeddedPostgresError(
                f"Postgres in {place.home} made no progress for {patience_s:g} s while starting. Look at the disk and "
                f"at its log in {place.log}, then start again:\n{_log_end(place)}"
            )
        time.sleep(_POLL_S)


def _startup_log(place: Place) -> Path:
    """What the server says before (and besides) its log collector."""
    return place.home / "startup.log"


def _log_size(place: Place) -> int:
    return sum(path.stat().st_size for path in place.log.iterdir())


def _log_end(place: Place) -> str:
    newest = sorted(place.log.glob("*.log"), key=lambda path: path.stat().st_mtime)[-1:]
    return "\n".join(last_lines(path.read_text(errors="replace"), 10) for path in [_startup_log(place), *newest])
