"""Where the embedded server's files live: in the data directory, or elsewhere if the server's user cannot get there."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.embedded.account import Account, account_for, runs_as_root
from app.embedded.errors import EmbeddedPostgresError

# Where a root service keeps clusters that cannot be in the data directory: persistent, and traversable by everyone.
_SYSTEM_DIRECTORIES = (Path("/var/lib"), Path("/usr/local/var"), Path("/srv"))

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Place:
    """`home` belongs to whoever runs the service; of what is in it the server's account owns `cluster` and `log`."""

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
        """What the titles of this cluster's server processes begin with."""
        return f"halfnote-{_digest(self.home)}"

    @property
    def log(self) -> Path:
        """The directory of the server's log files."""
        return self.home / "log"


def find_place(data_dir: Path) -> Place:
    """Finds the place that `data_dir` records, or makes one; raises EmbeddedPostgresError, OSError.

    A checkout below /root (mode 0700) is out of reach for the server's user. Opening up ancestors would expose what
    their owner closed, so then the cluster goes to a system directory and `data_dir` records which.
    """
    record = data_dir / "postgres-location"
    if record.exists():
        return _recorded_place(record)
    _make_directory(data_dir)
    home = data_dir / "postgres"
    _make_directory(home)
    account = account_for(home / "cluster")
    if account.can_enter(home):
        return Place(home, account)
    if (home / "cluster").exists():
        raise EmbeddedPostgresError(
            f"The server's user ({account.name}) can no longer reach its cluster in {home}. Make every directory "
            "above it traversable for that user, or move the data directory to where it is."
        )
    home = _system_home(data_dir, account)
    record.write_text(f"{home}\n")
    _log.warning("embedded_postgres_placed_elsewhere", data_dir=str(data_dir), home=str(home), account=account.name)
    return Place(home, account)


def _recorded_place(record: Path) -> Place:
    home = Path(record.read_text().strip())
    if not home.is_dir():
        raise EmbeddedPostgresError(
            f"{record} says that the database is in {home}, which does not exist. Restore it, or delete {record} to "
            "begin with an empty database."
        )
    return Place(home, account_for(home / "cluster"))


def _make_directory(directory: Path) -> None:
    """Makes the directory and its parents; root's is traversable whatever the umask, existing ones stay as they are."""
    if directory.is_dir():
        return
    directory.mkdir(parents=True, mode=0o755)
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
