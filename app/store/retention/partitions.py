"""Remove the tables of a day: detach, count and drop them."""

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import date
from typing import Literal

from app.database.connection import Connection
from app.models import DAY_TABLES
from app.store.retention.day_ranges import IdRange
from app.store.retention.days import partition_name

# The order in which tables are detached. Without outbox rows, the relay no longer reads the day. half goes before op,
# so that no transaction ever appears undecided because its Op was detached first.
DETACHED = ("outbox", "half", "op", "receipt", "attempt")
assert set(DETACHED) == set(DAY_TABLES)
# The tables whose rows `manifest` compares.
COMPARED = ("half", "op", "outbox")

STANDING = """
select case when to_regclass($1) is null then 'dropped' else coalesce(
  (select case when inhdetachpending then 'detaching' else 'attached' end from pg_inherits
   where inhrelid = to_regclass($1) and inhparent = to_regclass($2)), 'detached') end
"""

PartitionState = Literal["attached", "detaching", "detached", "dropped"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The counts of a detached day, or of a range of its ids: its rows, and its contradictions."""

    halves: int
    ops: int
    messages: int
    published: int
    undecided: int
    strays: int
    unpublished: int
    ghosts: int

    @classmethod
    def total(cls, parts: Iterable["Manifest"]) -> "Manifest":
        """Return the sum of the manifests of parts of a day. Each transaction is in one part."""
        counts = [astuple(part) for part in parts]
        return cls(*(sum(column) for column in zip(*counts, strict=True)))

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


async def manifest(connection: Connection, day: date, ids: IdRange) -> Manifest:
    """Count the rows of a day's detached tables in a range of ids. The read blocks no other session.

    Rows are compared only with rows of the same transaction, so the manifests of all ranges add up to the day's.
    """
    half, op, outbox = (partition_name(table, day) for table in COMPARED)
    row = await connection.fetchrow(
        f"""
with h as materialized (select transaction_id, position from {half} where transaction_id between $1 and $2),
o as materialized (select transaction_id, verdict from {op} where transaction_id between $1 and $2),
b as materialized (select transaction_id, position from {outbox} where transaction_id between $1 and $2)
select (select count(*) from h where position = 0) as halves, (select count(*) from o) as ops,
  (select count(*) from h) as messages, (select count(*) from b) as published,
  (select count(*) from h left join o using (transaction_id)
   where h.position = 0 and o.transaction_id is null) as undecided,
  (select count(*) from o left join (select transaction_id from h where position = 0) h using (transaction_id)
   where h.transaction_id is null) as strays,
  (select count(*) from h join o using (transaction_id)
   left join b on b.transaction_id = h.transaction_id and b.position = h.position
   where o.verdict = 1 and b.transaction_id is null) as unpublished,
  (select count(*) from b left join (
     select h.transaction_id, h.position from h join o using (transaction_id) where o.verdict = 1
   ) c using (transaction_id, position)
   where c.transaction_id is null) as ghosts
""",  # noqa: S608 -- the names are made of a date
        ids.first,
        ids.last,
    )
    assert row is not None
    return Manifest(**row)


async def drop(connection: Connection, day: date) -> None:
    """Drop all detached tables of a day, or none."""
    names = ", ".join(partition_name(table, day) for table in DETACHED)
    await connection.execute(f"drop table {names}")


async def undecided_ids(connection: Connection, day: date, ids: IdRange, at_most: int) -> list[str]:
    """Return some transactions of a detached day in a range of ids that have no verdict.

    In the order of their ids, as `<producer_group>/<transaction_id>`.
    """
    half, op = partition_name("half", day), partition_name("op", day)
    rows = await connection.fetch(
        f"""
select h.producer_group, h.transaction_id from {half} h
left join (select transaction_id from {op} where transaction_id between $1 and $2) o using (transaction_id)
where h.transaction_id between $1 and $2 and h.position = 0 and o.transaction_id is null
order by h.transaction_id limit $3
""",  # noqa: S608 -- the names are made of a date
        ids.first,
        ids.last,
        at_most,
    )
    return [f"{row['producer_group']}/{row['transaction_id']}" for row in rows]
