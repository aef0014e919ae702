"""The staging directory of a run, which holds the rows that it read and is removed when the run ends."""

import contextlib
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

PREFIX = "halfnote-proof-"


@contextmanager
def staging(parent: Path | None = None, *, keep: bool = False) -> Iterator[Path]:
    """Make a directory below `parent` (by default the machine's for temporary files) and remove it at the end.

    Directories of killed runs are removed first: a run holds a lock on a file in its directory while it runs.
    """
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    directory = parent / f"{PREFIX}{secrets.token_hex(8)}"
    directory.mkdir(parents=True, mode=0o700)
    with (directory / "lock").open("w") as lock:
        _try_lock(lock)
        try:
            yield directory
        finally:
            if keep:
                # Without its lock file, the next run does not remove a directory that is to be kept.
                (directory / "lock").unlink()
            else:
                _remove(directory)


def _sweep(parent: Path) -> None:
    for left in parent.glob(f"{PREFIX}*"):
        # A directory without a lock file is being made or removed.
        with contextlib.suppress(OSError), (left / "lock").open("r+") as lock:
            if _try_lock(lock):
                _remove(left)


def _remove(directory: Path) -> None:
    # Spark's threads may still be removing their files.
    for _ in range(3):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return


def _try_lock(lock: TextIO) -> bool:
    """Take the lock; False if another process has it, or if the filesystem has no such locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
