"""The list of the files that `--keep-staging` leaves, with their digests: it shows later whether they are intact.

Parquet has no checksum of a whole file, so a changed bit can look like another value.
"""

import hashlib
import json
from pathlib import Path

# `[{path, bytes, sha256}]`, the paths relative to its own directory.
LIST = "files.json"


def write_lists(staging: Path, of: str) -> None:
    """Write LIST into each directory below `staging` that has a file named `of`."""
    for found in sorted(staging.rglob(of)):
        directory = found.parent
        listed = [_described(path, directory) for path in sorted(directory.rglob("*")) if _is_data(path, directory)]
        (directory / LIST).write_text(json.dumps(listed) + "\n", encoding="utf-8")


def _is_data(path: Path, directory: Path) -> bool:
    # Spark and Hadoop read no file whose name begins so.
    return path.is_file() and not any(part.startswith(("_", ".")) for part in path.relative_to(directory).parts)


def _described(path: Path, directory: Path) -> dict[str, str | int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"path": path.relative_to(directory).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
