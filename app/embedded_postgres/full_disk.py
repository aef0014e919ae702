"""Find the full disk that keeps a server from starting."""

import shutil
from dataclasses import dataclass
from pathlib import Path

# The server's messages are in English (binaries.clean_environment).
NO_SPACE = "No space left on device"
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


def _disk_of(directory: Path) -> FullDisk:
    mount = next(path for path in (directory, *directory.parents) if path.is_mount() or path == path.parent)
    return FullDisk(mount, shutil.disk_usage(directory).free)
