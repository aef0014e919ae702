"""How Postgres executes a statement: EXPLAIN ANALYZE of the prepared statement, under a custom and a generic plan."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.database.connection import Connection

BIG = ("half", "op", "outbox", "receipt", "attempt")


@dataclass(frozen=True)
class Scan:
    """An executed scan of a table: its plan node, its table or partition, and the number of rows that it read."""

    node: str
    table: str
    index: str | None
    rows: float


async def scans(
    db: Connection, statement: str, types: Sequence[str], arguments: Sequence[Any], *, generic: bool
) -> list[Scan]:
    """Run a statement in a database transaction that is rolled back; return the scans that were executed."""
    await db.execute(f"set plan_cache_mode = force_{'generic' if generic else 'custom'}_plan")
    transaction = db.transaction()
    await transaction.start()
    try:
        await db.execute(f"prepare asked ({', '.join(types)}) as {statement}")
        literals = ", ".join(f"{literal(value)}::{kind}" for value, kind in zip(arguments, types, strict=True))
        plan = await db.fetchval(f"explain (analyze, format json) execute asked ({literals})")
        await db.execute("deallocate asked")
    finally:
        await transaction.rollback()
    return list(_scans(json.loads(plan)[0]["Plan"]))


def _scans(node: dict[str, Any]) -> Iterator[Scan]:
    loops = node["Actual Loops"]
    if "Relation Name" in node and node["Node Type"].endswith("Scan") and loops:
        read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * loops
        yield Scan(node["Node Type"], node["Relation Name"], node.get("Index Name"), read)
    for child in node.get("Plans", []):
        yield from _scans(child)


def literal(value: Any) -> str:
    """Write a value as an SQL literal."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return "array[" + ", ".join(literal(element) for element in value) + "]"
    if isinstance(value, bytes):
        return f"'\\x{value.hex()}'"
    if isinstance(value, bool | int | float):
        return str(value)
    return "'" + str(value).replace("'", "''") + "'"


def big(found: Sequence[Scan]) -> list[Scan]:
    """Return the scans of the big tables' partitions."""
    return [scan for scan in found if scan.table.partition("_2")[0] in BIG]
