"""When an attempt may be removed from an archive: the table of docs/archive.md, "What is removed", case by case."""

from datetime import date
from typing import Any
from uuid import UUID

import pytest

from spark.archive.records import ArchivedDay
from spark.archive.removal import UNREADABLE, Fate, fate
from spark.engine.filesystem import is_below, normal
from spark.manifest import TABLES

DAY = date(2026, 11, 10)
NAMED, OTHER = "0b6f6a1e-6a0e-4f4b-9d51-0b2f3d1c7a55", "5c1f6a1e-6a0e-4f4b-9d51-0b2f3d1c7a55"
ROOT = "file:/archive"


def described(digest: str = "1030", *, rows: int = 10, bodies: bool = True, replaces: tuple[str, ...] = ()) -> Any:
    table = {"rows": rows, "first_id": "a", "last_id": "b", "digest": digest}
    return {"bodies": bodies, "replaces": list(replaces), "tables": dict.fromkeys(TABLES, table)}


def row(state: str, named: Any = None, root: str = ROOT) -> ArchivedDay:
    place = None if named is None else f"{root}/day={DAY}/{NAMED}"
    ids = (UUID(int=0), UUID(int=1))
    return ArchivedDay(DAY, *ids, state, place, named, held=[], final=True, differs=False)


STAYS, REPORTED, REMOVED = Fate.STAYS, Fate.REPORTED, Fate.REMOVED
SAME, LATER = described(), described("2", rows=11)
STATES = ("open", "archiving", "gone")
# Of each case: the attempt, its manifest.json, the day's row, whether the attempt that the row names is whole, fate.
CASES = [
    # What the row names stays, whatever is left of it, and wherever the archive was when the row was written.
    *[
        (NAMED, found, row(state, SAME, root), whole, STAYS)
        for state in STATES
        for root in (ROOT, "file:///archive", "file:/mnt/big/archive", "s3a://bucket/halfnote")
        for found in (SAME, LATER, None, UNREADABLE)
        for whole in (True, False)
    ],
    # An incomplete attempt never counted; but of a day that is not on record nothing is removed.
    *[(OTHER, None, row(state, named), True, REMOVED) for state in STATES for named in (SAME, None)],
    (OTHER, None, None, False, STAYS),
    # A complete attempt is the only copy if the row names none, or if what it names is not whole, or unknown.
    (OTHER, SAME, None, False, REPORTED),
    *[(OTHER, SAME, row(state), False, REPORTED) for state in STATES],
    *[(OTHER, SAME, row(state, SAME), False, REPORTED) for state in STATES],
    *[(OTHER, SAME, row(state, described(replaces=(OTHER,))), False, REPORTED) for state in STATES],
    # The named one is whole: it lists what it replaces, or has the same rows.
    *[(OTHER, LATER, row(state, described(replaces=(OTHER,))), True, REMOVED) for state in STATES],
    *[(OTHER, SAME, row(state, SAME), True, REMOVED) for state in STATES],
    (OTHER, described(bodies=False), row("gone", SAME), True, REMOVED),
    # It lacks bodies, has other rows, has more rows that were not compared, or lists another attempt.
    (OTHER, SAME, row("gone", described(bodies=False)), True, REPORTED),
    (OTHER, described("2"), row("gone", SAME), True, REPORTED),
    (OTHER, LATER, row("gone", SAME), True, REPORTED),
    (OTHER, SAME, row("gone", LATER), True, REPORTED),
    (OTHER, LATER, row("gone", described(replaces=("another",))), True, REPORTED),
    (OTHER, UNREADABLE, row("gone", SAME), True, REPORTED),
]


@pytest.mark.parametrize(("name", "found", "of", "whole", "expected"), CASES)
def test_the_fate_of_an_attempt(name: str, found: Any, of: ArchivedDay | None, whole: bool, expected: Fate) -> None:
    assert fate(name, found, of, named_is_whole=whole) is expected


def test_addresses_of_one_place_are_equal() -> None:
    for place in ("file:/archive", "file:///archive", "file:///archive/", "file:/archive/"):
        assert normal(place) == "file:/archive"
        assert is_below("file:///archive/day=2026-11-10", place)
    assert normal("s3a://bucket/halfnote/") == "s3a://bucket/halfnote"
    assert not is_below("file:/archive2/day=2026-11-10", "file:/archive")
