"""The files of a folder, and of its subfolders."""

from collections.abc import Iterator
from pathlib import Path

from app.cli.errors import WRONG_USAGE, Refusal

SUFFIXES = (".yaml", ".yml", ".json")


def files_of(folder: Path, *, recursive: bool) -> list[Path]:
    """Return the YAML and JSON files of a folder by name, then with `recursive` those of its subfolders.

    Hidden subfolders are left out: Kubernetes keeps the files of a ConfigMap in one, beside links to them. A folder to
    which several links lead is read once. Raises Refusal.
    """
    return list(_files(folder, set(), recursive=recursive))


def _files(folder: Path, seen: set[Path], *, recursive: bool) -> Iterator[Path]:
    seen.add(folder.resolve())
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise Refusal(f"{folder} cannot be read: {error.strerror}.", code=WRONG_USAGE) from None
    folders = [one for one in entries if one.is_dir()]
    yield from (one for one in entries if one.suffix in SUFFIXES and one not in folders)
    for one in folders if recursive else ():
        if not one.name.startswith(".") and one.resolve() not in seen:
            yield from _files(one, seen, recursive=True)
