"""Make a cluster and its password with initdb: completely or not at all."""

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from app.embedded_postgres.binaries import Installation, clean_environment
from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.foreign import UNFINISHED, refuse_other_version
from app.embedded_postgres.paths import ServerPaths
from app.embedded_postgres.synced_files import sync_directory, write_synced

USER = "halfnote"
DATABASE = "halfnote"

_SETTINGS_FILE = "halfnote.conf"

_INITDB = (
    f"--username={USER}",
    "--auth-host=scram-sha-256",
    "--auth-local=scram-sha-256",
    "--encoding=UTF8",
    # The built-in provider sorts by code point on every system, so an index never depends on the system's libc.
    "--locale-provider=builtin",
    "--builtin-locale=C.UTF-8",
    "--locale=C",
)

# Durability (fsync, synchronous_commit, full_page_writes) stays at Postgres's default, which is on.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    # No sessions before a recovery, also one from an archive, is over: until then the database is read-only.
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
    # No details: those of a violated constraint quote the row, and bodies are never logged.
    "log_error_verbosity": "terse",
}


def ensure_cluster(paths: ServerPaths, installation: Installation, *, sync: bool) -> None:
    """Make the cluster unless it exists. Raises EmbeddedPostgresError for another version, a standby, a failed initdb.

    It is made under another name and renamed when it is on disk, so a killed initdb leaves no cluster.
    """
    if paths.cluster.exists():
        refuse_other_version(paths.home)
        _check_standby(paths)
        return
    for leftover in paths.home.glob(f"{UNFINISHED}*"):
        # An initdb that outlived its service may still write there; the next start removes the rest.
        shutil.rmtree(leftover, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=paths.home))
    write_synced(fresh / "password", "x", secrets.token_urlsafe(32))
    paths.account.own(fresh / "password")
    paths.account.own(fresh)
    _initdb(fresh, paths, installation, sync=sync)
    write_synced(fresh / "data" / "postgresql.conf", "a", f"\ninclude '../../{_SETTINGS_FILE}'\n")
    sync_directory(fresh)
    fresh.rename(paths.cluster)
    sync_directory(paths.home)


def _initdb(fresh: Path, paths: ServerPaths, installation: Installation, *, sync: bool) -> None:
    outcome = subprocess.run(  # noqa: S603 - our own program and options
        [
            str(installation.bin("initdb")),
            *_INITDB,
            f"--pwfile={fresh / 'password'}",
            *([] if sync else ["--no-sync"]),
            f"--pgdata={fresh / 'data'}",
        ],
        user=paths.account.uid,
        group=paths.account.gid,
        extra_groups=paths.account.extra_groups,
        cwd=fresh,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if outcome.returncode != 0:
        raise EmbeddedPostgresError(
            f"initdb could not make a database in {paths.home} (exit status {outcome.returncode}); fix what it says "
            f"and start again:\n{last_lines(outcome.stdout)}"
        )


def _check_standby(paths: ServerPaths) -> None:
    """Raise EmbeddedPostgresError for a standby, which takes no writes until it is promoted."""
    if (paths.pgdata / "standby.signal").exists():
        raise EmbeddedPostgresError(
            f"{paths.pgdata} is a standby (standby.signal), on which Halfnote cannot write. Promote it first, or set "
            "HALFNOTE_DATABASE_URL to its primary."
        )


def read_password(paths: ServerPaths) -> str:
    """Return the generated password of USER."""
    return (paths.cluster / "password").read_text()


def write_settings(paths: ServerPaths, port: int, settings: Mapping[str, str]) -> None:
    """Write our settings, overridden by the caller's `settings`, to the file that postgresql.conf includes."""
    ours = {"port": str(port), "log_directory": str(paths.log), "cluster_name": paths.cluster_name}
    lines = (f"{name} = {_quoted(value)}" for name, value in {**_SETTINGS, **ours, **settings}.items())
    # In the home, which the server cannot write: root must not follow links that the server's user makes.
    file = paths.home / _SETTINGS_FILE
    file.write_text("\n".join(["# Written at each start.", *lines, ""]), encoding="utf-8")
    file.chmod(0o644)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "''")
    return f"'{escaped}'"


def last_lines(text: str, count: int = 15) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(text.strip().splitlines()[-count:])
