"""How Postgres executes a statement: EXPLAIN ANALYZE of the prepared statement, under a custom and a generic plan."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.database.connection import Connection

BIG = ("half", "op", "outbox", "receipt", "attempt")


@dataclass(frozen=True)
class Scan:
    """An executed scan: its plan node, its table, partition or part of `with`, the number of rows that it read, and its
    conditions on the index."""

    node: str
    table: str
    index: str | None
    rows: float
    condition: str = ""


async def scans(
    db: Connection,
    statement: str,
    types: Sequence[str],
    arguments: Sequence[Any],
    *,
    generic: bool,
    parts: bool = False,
) -> list[Scan]:
    """Run a statement in a database transaction that is rolled back; return the scans that were executed.

    `parts`: whether scans of the parts of `with` are returned too.
    """
    await db.execute(f"set plan_cache_mode = force_{'generic' if generic else 'custom'}_plan")
    transaction = db.transaction()
    await transaction.start()
    try:
        literals = ", ".join(f"{literal(value)}::{kind}" for value, kind in zip(arguments, types, strict=True))
        await db.execute(f"prepare asked {_listed(', '.join(types))} as {statement}")
        plan = await db.fetchval(f"explain (analyze, format json) execute asked {_listed(literals)}")
        await db.execute("deallocate asked")
    finally:
        await transaction.rollback()
    return [scan for scan in _scans(json.loads(plan)[0]["Plan"]) if parts or scan.node != "CTE Scan"]


def _listed(arguments: str) -> str:
    return f"({arguments})" if arguments else ""


def _scans(node: dict[str, Any]) -> Iterator[Scan]:
    loops, table = node["Actual Loops"], node.get("Relation Name", node.get("CTE Name"))
    if table is not None and node["Node Type"].endswith("Scan") and loops:
        read = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * loops
        yield Scan(node["Node Type"], table, node.get("Index Name"), read, node.get("Index Cond", ""))
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
