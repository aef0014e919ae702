"""Where a run keeps what it read until it is done: a directory of its own, gone when the run ends, however it ends."""

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

    What runs left that were killed is removed first: a run holds a lock on a file in its directory while it lives.
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
                # What is to be kept is no left-over: without its lock the next run leaves it alone.
                (directory / "lock").unlink()
            else:
                _remove(directory)


def _sweep(parent: Path) -> None:
    for left in parent.glob(f"{PREFIX}*"):
        # Without a lock file it is just being made, or just being removed.
        with contextlib.suppress(OSError), (left / "lock").open("r+") as lock:
            if _try_lock(lock):
                _remove(left)


def _remove(directory: Path) -> None:
    # Spark's own threads may still be removing files of theirs.
    for _ in range(3):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return


def _try_lock(lock: TextIO) -> bool:
    """Take the lock; False if another process has it, or where such locks are not to be had."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
