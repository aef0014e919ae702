"""A cluster's files: made by initdb all at once or not at all, with its password beside them."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from app.embedded.errors import EmbeddedPostgresError
from app.embedded.installation import MAJOR_VERSION, Installation, clean_environment
from app.embedded.place import Place

USER = "halfnote"
DATABASE = "halfnote"

_SETTINGS_FILE = "halfnote.conf"

_INITDB = (
    f"--username={USER}",
    "--auth-host=scram-sha-256",
    "--auth-local=scram-sha-256",
    "--encoding=UTF8",
    # The built-in provider sorts by code point on every system alike, so an index never depends on the system's libc.
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--locale=C",
)

# Durability (fsync, synchronous_commit, full_page_writes) stays at Postgres's default, which is on.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    # Sessions only when a recovery, also one from an archive, is over: before, the database is read-only.
    "hot_standby": "off",
    "max_connections": "100",
    "shared_buffers": "128MB",
    # Halves are written once and read soon: rare, spread-out checkpoints keep full-page images out of the hot path.
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "wal_compression": "on",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "on",
    # One file a weekday, overwritten a week later.
    "log_filename": "postgres-%a.log",
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
    "log_truncate_on_rotation": "on",
    "log_line_prefix": "%m [%p] %q%a ",
    # Without details: those of a violated constraint quote the row, and bodies are never logged.
    "log_error_verbosity": "terse",
}


def ensure_cluster(place: Place, installation: Installation, *, sync: bool) -> None:
    """Makes the cluster unless it is there; raises EmbeddedPostgresError if it is of another version or a standby, or
    initdb fails.

    It is made under another name and renamed once it is on disk, so one whose initdb was killed never counts.
    """
    if place.cluster.exists():
        _check_version(place)
        _check_standby(place)
        return
    for leftover in place.home.glob("cluster.new-*"):
        # An initdb that outlived its service may still be writing there: what stays is removed by the next start.
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix="cluster.new-", dir=place.home))
    _write_synced(fresh / "password", "x", secrets.token_urlsafe(32))
    place.account.own(fresh / "password")
    place.account.own(fresh)
    _initdb(fresh, place, installation, sync=sync)
    _write_synced(fresh / "data" / "postgresql.conf", "a", f"\ninclude '../../{_SETTINGS_FILE}'\n")
    _sync_directory(fresh)
    fresh.rename(place.cluster)
    _sync_directory(place.home)


def _initdb(fresh: Path, place: Place, installation: Installation, *, sync: bool) -> None:
    outcome = subprocess.run(  # noqa: S603 - our own program and options
        [
            str(installation.bin("initdb")),
            *_INITDB,
            f"--pwfile={fresh / 'password'}",
            *([] if sync else ["--no-sync"]),
            f"--pgdata={fresh / 'data'}",
        ],
        user=place.account.uid,
        group=place.account.gid,
        extra_groups=place.account.extra_groups,
        cwd=fresh,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if outcome.returncode != 0:
        raise EmbeddedPostgresError(
            f"initdb could not make a database in {place.home} (exit status {outcome.returncode}); fix what it says "
            f"and start again:\n{last_lines(outcome.stdout)}"
        )


def _check_version(place: Place) -> None:
    version = (place.pgdata / "PG_VERSION").read_text().strip()
    if version != str(MAJOR_VERSION):
        raise EmbeddedPostgresError(
            f"{place.pgdata} was made by Postgres {version}, and this Halfnote brings Postgres {MAJOR_VERSION}. Dump "
            "it with the Halfnote that made it and restore into an empty HALFNOTE_DATA_DIR, or set "
            "HALFNOTE_DATABASE_URL."
        )


def _check_standby(place: Place) -> None:
    """A standby takes no sessions that write until it is promoted: whoever waited for that would wait for ever."""
    if (place.pgdata / "standby.signal").exists():
        raise EmbeddedPostgresError(
            f"{place.pgdata} is a standby (standby.signal), on which Halfnote cannot write. Promote it first, or set "
            "HALFNOTE_DATABASE_URL to its primary."
        )


def read_password(place: Place) -> str:
    """The generated password of USER."""
    return (place.cluster / "password").read_text()


def write_settings(place: Place, port: int, settings: Mapping[str, str]) -> None:
    """Writes our settings, with the caller's `settings` on top, to the file that postgresql.conf includes."""
    ours = {"port": str(port), "log_directory": str(place.log), "cluster_name": place.cluster_name}
    lines = (f"{name} = {_quoted(value)}" for name, value in {**_SETTINGS, **ours, **settings}.items())
    # In the home, which the server cannot write: root must not follow links that it could plant.
    file = place.home / _SETTINGS_FILE
    file.write_text("\n".join(["# Written at each start.", *lines, ""]), encoding="utf-8")
    file.chmod(0o644)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def _write_synced(path: Path, mode: str, text: str) -> None:
    """Writes to disk what a power cut must not take; a new file is for its owner's eyes only."""
    with open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(directory: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def last_lines(text: str, count: int = 15) -> str:
    """The end of what a program said."""
    return "\n".join(text.strip().splitlines()[-count:])
