"""The paths of the embedded server's files: in the data directory, or elsewhere if the server's user has no access."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.location import record_home, recorded_home, refuse_other_owner
from app.embedded_postgres.os_account import Account, account_for, runs_as_root

# Where a root service keeps clusters that cannot be in the data directory: persistent, and traversable by everyone.
_SYSTEM_DIRECTORIES = (Path("/var/lib"), Path("/usr/local/var"), Path("/srv"))

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServerPaths:
    """`home` belongs to the service's user. The server's account owns `cluster` and `log` within it."""

    home: Path
    account: Account

    @property
    def cluster(self) -> Path:
        """The directory of PGDATA and the password; it appears by one rename when it is complete."""
        return self.home / "cluster"

    @property
    def pgdata(self) -> Path:
        """Postgres's own data directory."""
        return self.cluster / "data"

    @property
    def cluster_name(self) -> str:
        """The prefix of this cluster's process titles."""
        return f"halfnote-{_digest(self.home)}"

    @property
    def log(self) -> Path:
        """The directory of the server's log files."""
        return self.home / "log"


def find_paths(data_dir: Path) -> ServerPaths:
    """Return the paths that `data_dir` records, or make them. Raises EmbeddedPostgresError and OSError.

    A checkout below /root (mode 0700) is out of reach for the server's user. Opening its ancestors would expose
    private files, so the cluster is then in a system directory, which `data_dir` records.
    """
    recorded = recorded_home(data_dir)
    if recorded is not None:
        return ServerPaths(recorded, account_for(recorded / "cluster"))
    _make_directory(data_dir)
    home = data_dir / "postgres"
    _make_directory(home)
    account = account_for(home / "cluster")
    if account.can_enter(home):
        return ServerPaths(home, account)
    if (home / "cluster").exists():
        raise EmbeddedPostgresError(
            f"The server's user ({account.name}) can no longer reach its cluster in {home}. Make every directory "
            "above it traversable for that user, or move the data directory to a place that it can reach."
        )
    home = _system_home(data_dir, account)
    refuse_other_owner(home, data_dir)
    record_home(data_dir, home)
    _log.warning(
        "embedded_postgres_placed_elsewhere",
        data_dir=str(data_dir),
        home=str(home),
        account=account.name,
        advice="The database is in `home`: back it up together with `data_dir`.",
    )
    return ServerPaths(home, account)


def _make_directory(directory: Path) -> None:
    """Make the directory and its parents, traversable for root whatever the umask; existing ones stay unchanged."""
    if directory.is_dir():
        return
    # Another service may make it at the same time.
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    if runs_as_root():
        directory.chmod(0o755)


def _system_home(data_dir: Path, account: Account) -> Path:
    for base in _SYSTEM_DIRECTORIES:
        if base.is_dir() and account.can_enter(base) and os.access(base, os.W_OK):
            home = base / "halfnote" / _digest(data_dir)
            _make_directory(base / "halfnote")
            _make_directory(home)
            if account.can_enter(home):
                return home
    raise EmbeddedPostgresError(
        f"The server's user ({account.name}) cannot reach {data_dir}, and none of "
        f"{', '.join(map(str, _SYSTEM_DIRECTORIES))} can take its files. Set HALFNOTE_DATA_DIR to a directory that it "
        "can reach, start Halfnote as another user, or set HALFNOTE_DATABASE_URL."
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
