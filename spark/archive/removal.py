"""Decides which attempts of a day may be removed from an archive: the rule of docs/archive.md, "What is removed".

A complete attempt may be the only copy of its rows, for example after the database was restored to an earlier time. So
it is removed only if the attempt that the day's row names is whole and provably has all of it.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from spark import manifest
from spark.archive.layout import BESIDE, MANIFEST, manifest_of, wrong_lengths
from spark.archive.records import ArchivedDay
from spark.engine.filesystem import FAILURES, Files, name_of
from spark.errors import RunFailedError

# A key of the manifest: the names of the day's other attempts that this one was found to replace.
REPLACES = "replaces"
UNREADABLE = "unreadable"


class Fate(Enum):
    """What becomes of an attempt: it stays, it stays and is reported, or it is removed."""

    STAYS = "stays"
    REPORTED = "reported"
    REMOVED = "removed"


def fate(
    name: str, described: Mapping[str, Any] | str | None, row: ArchivedDay | None, *, named_is_whole: bool
) -> Fate:
    """Return the fate of the attempt `name`, whose manifest.json is `described`: None if missing, or UNREADABLE.

    `row`: the day's, if there is one. `named_is_whole`: the attempt that the row names is there, as the row has it.
    """
    if row is not None and is_named(row, name):
        return Fate.STAYS
    if described is None:
        # The manifest is written last, so such an attempt never counted. A day that is not on record may be one that a
        # restore of the database lost.
        return Fate.STAYS if row is None else Fate.REMOVED
    if row is None or row.archive_manifest is None or not named_is_whole or isinstance(described, str):
        return Fate.REPORTED
    named = row.archive_manifest
    return Fate.REMOVED if name in named.get(REPLACES, ()) or has_all(named, described) else Fate.REPORTED


def is_named(row: ArchivedDay, name: str) -> bool:
    """Return whether the day's row names this attempt, wherever its archive was at that time."""
    return row.archive is not None and name_of(row.archive) == name


def found_manifest(files: Files, place: str) -> Mapping[str, Any] | str | None:
    """Return an attempt's manifest.json, None if it does not exist, or UNREADABLE."""
    if not files.exists(f"{place}/{MANIFEST}"):
        return None
    try:
        return manifest_of(files, place)
    except RunFailedError:
        return UNREADABLE


def is_whole(files: Files, place: str, described: Mapping[str, Any]) -> bool:
    """Return whether an attempt is there as its row describes it; false if its files cannot be reached."""
    try:
        return not lacking(files, place, described)
    except (RunFailedError, *FAILURES):
        return False


def lacking(files: Files, place: str, described: Mapping[str, Any]) -> list[str]:
    """Return what of an attempt is not there as its row describes it: manifest.json, or a file with its length.

    Reads no rows: one request for each file. While a redaction is unfinished, manifest.json may still be the one before
    it.
    """
    listed = [file for held in described["tables"].values() for file in held["files"]]
    found = wrong_lengths(files, place, [*listed, *described.get(BESIDE, ())])
    if "rubbish" not in described and found_manifest(files, place) != described:
        found.insert(0, f"{MANIFEST} is not what the database has")
    return found


def has_all(kept: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether an attempt has the same rows as another, by their manifests, and bodies if the other has them."""
    return not manifest.differing(kept, other) and (kept["bodies"] or not other["bodies"])
