"""Syncs an archive's files to disk."""

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit


def sync(places: Iterable[str]) -> None:
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


def _local(place: str) -> Path | None:
    parts = urlsplit(place)
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
