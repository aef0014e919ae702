"""Where a data directory's cluster is, if it is not in it, and to which data directory such a cluster belongs."""

import os
from pathlib import Path

from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.synced_files import replace_synced

_LOCATION = "postgres-location"
_OWNER = "data-directory"


def recorded_home(data_dir: Path) -> Path | None:
    """Return the directory that `data_dir` names as its cluster's; None if it names none.

    Raises EmbeddedPostgresError if that directory is missing or belongs to another data directory.
    """
    record = data_dir / _LOCATION
    if not record.exists():
        return None
    home = _read_path(record)
    if home is None:
        raise EmbeddedPostgresError(
            f"{record} does not have the absolute path of a directory. Write the path of this database's directory "
            "into it, or delete it: a cluster made for the path of this data directory is then found again."
        )
    if not home.is_dir():
        raise EmbeddedPostgresError(
            f"{record} says that the database is in {home}, which does not exist. Restore it, or delete {record} to "
            "begin with an empty database."
        )
    refuse_other_owner(home, data_dir)
    return home


def record_home(data_dir: Path, home: Path) -> None:
    """Record in `data_dir` that its cluster is in `home`."""
    _write_path(data_dir / _LOCATION, home)


def record_owner(home: Path, data_dir: Path) -> None:
    """Record in `home`, if it is outside of `data_dir`, that it belongs to it. Only for the holder of the lock.

    A directory of an earlier version has no record yet. Raises EmbeddedPostgresError if it belongs to another one.
    """
    if not (data_dir / _LOCATION).exists():
        return
    refuse_other_owner(home, data_dir)
    if not (home / _OWNER).exists():
        _write_path(home / _OWNER, data_dir.resolve())


def refuse_other_owner(home: Path, data_dir: Path) -> None:
    """Raise EmbeddedPostgresError if `home` belongs to another data directory than `data_dir`."""
    record = home / _OWNER
    if not record.exists():
        return
    owner = _read_path(record)
    if owner is None or not _same_directory(owner, data_dir):
        raise EmbeddedPostgresError(
            f"The database in {home} belongs to the data directory {owner or '(unreadable)'}, not to {data_dir} "
            f"({record} says so). If the data directory was moved, write {data_dir.resolve()} into {record}. If it is "
            f"a copy, copy {home} too, write the path of that copy into {data_dir / _LOCATION}, and "
            f"{data_dir.resolve()} into the file `{_OWNER}` of that copy. Or choose another HALFNOTE_DATA_DIR."
        )


def _same_directory(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    try:
        # A bind mount has another path.
        return one.samefile(other)
    except OSError:
        return False


def _read_path(record: Path) -> Path | None:
    """Return the absolute path in the file; None if it has none."""
    path = Path(os.fsdecode(record.read_bytes().rstrip(b"\r\n")))
    return path if path.is_absolute() else None


def _write_path(record: Path, path: Path) -> None:
    replace_synced(record, os.fsencode(path) + b"\n")
