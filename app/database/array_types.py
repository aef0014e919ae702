"""Tells asyncpg the arrays of Postgres's own types, which asyncpg asks each connection for.

asyncpg knows the types themselves, and of arrays only `oid[]` and `text[]`. The first statement of a connection that
has another one makes asyncpg read the catalog: a query that Postgres plans for 5 to 25 ms, once for each such type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import asyncpg

# (oid, name, oid of an element) of the arrays that statements pass or return. The numbers are in Postgres's source
# (pg_type.dat), and the same on every server.
ARRAYS = (
    (1000, "_bool", 16),
    (1001, "_bytea", 17),
    (1005, "_int2", 21),
    (1007, "_int4", 23),
    (1010, "_tid", 27),
    (1016, "_int8", 20),
    (1022, "_float8", 701),
    (1182, "_date", 1082),
    (1185, "_timestamptz", 1184),
    (1231, "_numeric", 1700),
    (2951, "_uuid", 2950),
    (3807, "_jsonb", 3802),
)

_Type: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _NoStatement:
    """Stands for the statement that reads the catalog. It has a name: no unnamed statement was replaced by it."""

    name: str = "none"


_KNOWN: dict[int, _Type] = {
    oid: {
        "oid": oid,
        "ns": "pg_catalog",
        "name": name,
        "kind": b"b",
        "basetype": None,
        "elemtype": element,
        "elemdelim": ",",
        "range_subtype": None,
        "attrtypoids": None,
        "attrnames": None,
        "basetype_name": None,
        "elemtype_name": None,
        "range_subtype_name": None,
    }
    for oid, name, element in ARRAYS
}


class KnowingConnection(asyncpg.Connection):
    """A connection that knows ARRAYS. It reads the catalog for other types, as asyncpg does."""

    async def _introspect_types(self, typeoids: Sequence[int], *rest: Any) -> tuple[Sequence[_Type], Any]:
        """Return the rows that describe these types, and the statement that has read them."""
        known = [_KNOWN[oid] for oid in typeoids if oid in _KNOWN]
        others = [oid for oid in typeoids if oid not in _KNOWN]
        if not others:
            return known, _NoStatement()
        read, statement = await super()._introspect_types(others, *rest)  # type: ignore[misc]
        return [*known, *read], statement
