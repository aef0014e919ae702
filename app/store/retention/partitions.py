"""Remove the tables of a day: detach, count and drop them."""

from dataclasses import dataclass
from datetime import date
from typing import Literal

from app.database.connection import Connection
from app.models import DAY_TABLES
from app.store.retention.days import partition_name

# The order in which tables are detached. Without outbox rows, the relay no longer reads the day. half goes before op,
# so that no transaction ever appears undecided because its Op was detached first.
DETACHED = ("outbox", "half", "op", "receipt", "attempt")
assert set(DETACHED) == set(DAY_TABLES)

STANDING = """
select case when to_regclass($1) is null then 'dropped' else coalesce(
  (select case when inhdetachpending then 'detaching' else 'attached' end from pg_inherits
   where inhrelid = to_regclass($1) and inhparent = to_regclass($2)), 'detached') end
"""

PartitionState = Literal["attached", "detaching", "detached", "dropped"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The counts of a detached day: its rows, and its contradictions."""

    halves: int
    ops: int
    messages: int
    published: int
    undecided: int
    strays: int
    unpublished: int
    ghosts: int

    @property
    def sound(self) -> bool:
        """Whether every Op has its half, and the published messages are exactly the committed ones."""
        return not (self.strays or self.unpublished or self.ghosts)


async def standing(connection: Connection, table: str, day: date) -> PartitionState:
    """Return the state of a table's partition of the day: attached, detaching, detached or dropped."""
    found: PartitionState = await connection.fetchval(STANDING, partition_name(table, day), table)
    return found


async def detach(connection: Connection, table: str, day: date, *, finalize: bool) -> None:
    """Detach one partition without blocking other sessions. It cannot run in a database transaction.

    It waits for statements that use the partition (the caller sets lock_timeout). If it is interrupted, the partition
    stays `detaching`, and `finalize` completes it.
    """
    how = "finalize" if finalize else "concurrently"
    await connection.execute(f"alter table {table} detach partition {partition_name(table, day)} {how}")


async def manifest(connection: Connection, day: date) -> Manifest:
    """Count the rows of a day's detached tables. The read blocks no other session."""
    half, op, outbox = (partition_name(table, day) for table in ("half", "op", "outbox"))
    row = await connection.fetchrow(f"""
select (select count(*) from {half} where position = 0) as halves, (select count(*) from {op}) as ops,
  (select count(*) from {half}) as messages, (select count(*) from {outbox}) as published,
  (select count(*) from {half} h left join {op} o using (transaction_id)
   where h.position = 0 and o.transaction_id is null) as undecided,
  (select count(*) from {op} o left join (select transaction_id from {half} where position = 0) h using (transaction_id)
   where h.transaction_id is null) as strays,
  (select count(*) from {half} h join {op} o using (transaction_id)
   left join {outbox} b on b.transaction_id = h.transaction_id and b.position = h.position
   where o.verdict = 1 and b.transaction_id is null) as unpublished,
  (select count(*) from {outbox} b left join (
     select h.transaction_id, h.position from {half} h join {op} o using (transaction_id) where o.verdict = 1
   ) c using (transaction_id, position)
   where c.transaction_id is null) as ghosts
""")  # noqa: S608 -- the names are made of a date
    assert row is not None
    return Manifest(**row)


async def drop(connection: Connection, day: date) -> None:
    """Drop all detached tables of a day, or none."""
    names = ", ".join(partition_name(table, day) for table in DETACHED)
    await connection.execute(f"drop table {names}")


async def undecided_ids(connection: Connection, day: date, at_most: int) -> list[str]:
    """Return some of a detached day's transactions that have no verdict, as `<producer_group>/<transaction_id>`."""
    half, op = partition_name("half", day), partition_name("op", day)
    rows = await connection.fetch(
        f"select h.producer_group, h.transaction_id from {half} h left join {op} o using (transaction_id) "  # noqa: S608
        "where h.position = 0 and o.transaction_id is null order by h.transaction_id limit $1",
        at_most,
    )
    return [f"{row['producer_group']}/{row['transaction_id']}" for row in rows]
