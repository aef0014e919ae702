"""Cut a day into ranges, so that the time of a statement does not grow with the day."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import UUID

from app.database.connection import Connection

# The most rows of a table in a range of ids, but for those of its last transaction. A hundred times as many are read
# within upkeep's `statement_timeout`.
ROWS_AT_ONCE = 100_000
# The most pages of a table that one statement reads: 16 MiB.
PAGES_AT_ONCE = 2_048
LOWEST, HIGHEST = UUID(int=0), UUID(int=2**128 - 1)

# The id of the $3rd row of each table from $1 to $2. Index-only, by the primary key, whose first column it is. The
# result is null if no table has so many rows.
_NTH = (
    "(select transaction_id from {} where transaction_id between $1 and $2 order by transaction_id offset $3 limit 1)"
)


@dataclass(frozen=True, slots=True)
class IdRange:
    """The transaction ids from `first` to `last`, both among them."""

    first: UUID
    last: UUID

    @classmethod
    def before(cls, low: UUID, high: UUID) -> "IdRange":
        """Return the half-open range of a day's ids."""
        return cls(low, UUID(int=high.int - 1))

    def after(self, other: "IdRange") -> "IdRange | None":
        """Return the part of this range that follows another one, or None if nothing does."""
        return None if other.last >= self.last else IdRange(UUID(int=other.last.int + 1), self.last)


ALL_IDS = IdRange(LOWEST, HIGHEST)


@asynccontextmanager
async def by_ranges(connection: Connection) -> AsyncIterator[None]:
    """Let the statements of a database transaction read ranges by an index, and join them without probes.

    The planner's estimate for a range is bad while the table's statistics are old. By a sequential scan each range
    would read the whole table, and by nested loops each row of one table would read a range of the other.
    """
    async with connection.transaction():
        await connection.execute("set local enable_seqscan = off; set local enable_nestloop = off")
        yield


async def first_range(connection: Connection, relations: Sequence[str], within: IdRange, at_once: int) -> IdRange:
    """Return the first part of a range in which each relation has about `at_once` rows at most; the last has fewer.

    The relations' primary keys begin with `transaction_id`.
    """
    nths = ", ".join(_NTH.format(relation) for relation in relations)
    last: UUID | None = await connection.fetchval(f"select least({nths})", within.first, within.last, at_once - 1)
    return IdRange(within.first, within.last if last is None else last)


async def pages(connection: Connection, relation: str) -> int:
    """Return how many pages a table has."""
    number: int = await connection.fetchval(
        "select pg_relation_size($1::text::regclass) / current_setting('block_size')::bigint", relation
    )
    return number
