"""The lock of an embedded Postgres: a file lock that the operating system drops when its owner dies."""

import os
import sys
from pathlib import Path

from app.embedded_postgres.errors import InUseError

if sys.platform == "win32":
    import msvcrt

    # Windows makes locked bytes unreadable, so the locked byte is far behind the owner's pid.
    _LOCKED_BYTE = 1 << 20

    def _try_lock(descriptor: int) -> None:
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)

else:
    import fcntl

    def _try_lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Ownership:
    """A held lock. `release` ends it, and so does the owner's death, even by `kill -9`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, lock_file: Path, *, data_dir: Path) -> "Ownership":
        """Take the lock and write this pid into the file. Raises InUseError, which names the owner's pid."""
        # Python's descriptors are not inheritable: Postgres may outlive this process and must not keep the lock.
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _try_lock(descriptor)
        except OSError as error:
            owner = os.read(descriptor, 20).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise InUseError(
                f"{data_dir} is in use by another Halfnote service (pid {owner}). Choose another HALFNOTE_DATA_DIR, "
                "give both services one database with HALFNOTE_DATABASE_URL, or run the service with more "
                "workers (`halfnote serve --workers N`)."
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        return cls(descriptor)

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._descriptor is not None

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
