"""Introspect each built-in Postgres type once a process, instead of once a connection.

asyncpg asks Postgres to describe an array type when a connection first meets it: 10 ms of a CPU each time, a quarter of
what Postgres does in a test. A test opens several connections, and the answers are always the same.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import asyncpg

# Postgres assigns the oids below this one by hand: they are the same in every database of every version.
FIRST_GENERATED_OID = 10_000

# The stubs leave private members out.
_CONNECTION: Any = asyncpg.Connection
_introspect = _CONNECTION._introspect_types
_described: dict[int, list[Any]] = {}
# asyncpg prepares its statement again if an unnamed one ran in between; here none did.
_NO_STATEMENT = SimpleNamespace(name="remembered")


async def _introspect_once(self: Any, typeoids: Iterable[int], timeout: float) -> tuple[list[Any], Any]:
    oids = list(typeoids)
    if max(oids) >= FIRST_GENERATED_OID:
        return await _introspect(self, oids, timeout)  # type: ignore[no-any-return]
    statement: Any = _NO_STATEMENT
    for oid in oids:
        if oid not in _described:
            _described[oid], statement = await _introspect(self, [oid], timeout)
    return [row for oid in oids for row in _described[oid]], statement


def remember_types() -> None:
    """Make every connection of this process use the types that an earlier one has introspected."""
    _CONNECTION._introspect_types = _introspect_once
