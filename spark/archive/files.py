"""An archive's file operations, on any filesystem that Spark supports."""

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from spark.engine.filesystem import Files


class ArchiveFiles(Files):
    """Files with their lengths, digests and syncs. Failures are Py4JJavaError."""

    def qualified(self, place: str) -> str:
        """Return the full URL of a place, such as `file:/archive`, which means the same on every machine."""
        system, path = self._at(place)
        return str(system.makeQualified(path).toString()).rstrip("/")

    def size(self, place: str) -> int:
        """Return a file's length in bytes."""
        system, path = self._at(place)
        return int(system.getFileStatus(path).getLen())

    def sha256(self, place: str) -> str:
        """Return the SHA-256 of a file's bytes, as hex; reads it in pieces."""
        system, path = self._at(place)
        stream = system.open(path)
        try:
            return str(self._jvm.org.apache.commons.codec.digest.DigestUtils.sha256Hex(stream))
        finally:
            stream.close()

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory, sorted; none if the directory does not exist."""
        return sorted(name_of(child) for child in self.children(directory))

    def sync(self, places: Iterable[str]) -> None:
        """Sync local files and their parent directories to disk, because Postgres drops rows once these files exist.

        Other filesystems guarantee durability when a file is closed.
        """
        above: set[Path] = set()
        for place in places:
            path = _local(place)
            if path is not None:
                _sync(path)
                above.update(path.parents)
        for directory in above:
            if os.access(directory, os.R_OK):
                _sync(directory)


def name_of(place: str) -> str:
    """Return the last part of a path or URL."""
    return place.rstrip("/").rpartition("/")[2]


def _local(place: str) -> Path | None:
    parts = urlsplit(place)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
