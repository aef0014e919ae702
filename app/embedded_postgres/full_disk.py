"""Find the full disk, or the used up disk quota, that keeps a server from starting."""

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

# The server's messages are in English (binaries.clean_environment).
NO_SPACE = "No space left on device"
OVER_QUOTA = os.strerror(errno.EDQUOT)
# The first line of a start in the server's log, after which it may have ended.
STARTING = "starting PostgreSQL"
# A start writes whole segments of WAL, 16 MB each, and removes what did not fit. With more room than this, the log's
# line about a full disk is an old one.
FULL_BELOW_BYTES = 64 * 2**20


@dataclass(frozen=True)
class FullDisk:
    """A file system without room, by the directory where it is mounted."""

    mount: Path
    free_bytes: int


def find_full_disk(pgdata: Path, log_end: str) -> FullDisk | None:
    """Return the disk of the tables or of the WAL if the end of the server's log says that it is full."""
    if NO_SPACE not in log_end:
        return None
    # An operator may have moved the WAL to another disk.
    disks = [_disk_of(directory.resolve()) for directory in (pgdata, pgdata / "pg_wal") if directory.exists()]
    fullest = min(disks, key=lambda disk: disk.free_bytes, default=None)
    return None if fullest is None or fullest.free_bytes >= FULL_BELOW_BYTES else fullest


def find_used_up_quota(pgdata: Path, startup_end: str, log_end: str) -> Path | None:
    """Return where the disk is mounted, of the tables or of the WAL, of which this start has used up a quota.

    The quota itself is not measured: the system may count it for a user, a group or a project, and not where it is.
    `startup_end`, `log_end`: the end of the output of this start, and of what the server's log has got since.
    """
    lines = [*startup_end.splitlines(), *log_end.rpartition(STARTING)[2].splitlines()]
    told = [line for line in lines if OVER_QUOTA in line]
    if not told:
        return None
    # Postgres names files by their path in its directory.
    directory = pgdata / "pg_wal" if "pg_wal/" in told[-1] else pgdata
    return _mount_of(directory.resolve())


def _disk_of(directory: Path) -> FullDisk:
    return FullDisk(_mount_of(directory), shutil.disk_usage(directory).free)


def _mount_of(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.is_mount() or path == path.parent)
