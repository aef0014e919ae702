"""Count the results from the databases: the shop's database and the ledger of each consumer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg


@dataclass(frozen=True)
class Entry:
    """An effect of a consumer on an order, with its time."""

    number: int
    at: datetime


@dataclass(frozen=True)
class Counts:
    """Numbers of orders (or transfers). `announced`: at least one consumer has an entry for it.

    `lost`: it is in the database, and at least one consumer has no entry for it. `invented`: at least one consumer has
    an entry for it, and it is not in the database. `twice`: at least one consumer has several entries for it. `early`:
    at least one entry is older than the commit. `by_hand`: entries in consumers' ledgers that a person has to cancel.
    """

    saved: int
    announced: int
    lost: int
    invented: int
    twice: int
    early: int
    by_hand: int

    @property
    def flawless(self) -> bool:
        """Whether nothing is lost, invented, processed twice or too early."""
        return not (self.lost or self.invented or self.twice or self.early or self.by_hand)


def counted(saved: Mapping[int, datetime], ledgers: Mapping[str, Sequence[Entry]]) -> Counts:
    """PURE: compare the stored orders, by number with their commit times, with each consumer's entries."""
    times = {name: Counter(entry.number for entry in entries) for name, entries in ledgers.items()}
    heard = {number for counter in times.values() for number in counter}
    done = [(number, count) for counter in times.values() for number, count in counter.items()]
    early = {
        entry.number
        for entries in ledgers.values()
        for entry in entries
        if entry.number in saved and entry.at < saved[entry.number]
    }
    return Counts(
        saved=len(saved),
        announced=len(heard),
        lost=sum(any(number not in counter for counter in times.values()) for number in saved),
        invented=len(heard - saved.keys()),
        twice=len({number for number, count in done if count > 1}),
        early=len(early),
        by_hand=sum(count if number not in saved else count - 1 for number, count in done),
    )


async def read_saved(url: str, table: str) -> dict[int, datetime]:
    """Return the rows of a database, with the times of their commits (its server has track_commit_timestamp)."""
    rows = await fetch(url, f"select number, pg_xact_commit_timestamp(xmin) as at from {table}")  # noqa: S608 - ours
    return {row["number"]: row["at"] for row in rows}


async def read_ledger(url: str) -> list[Entry]:
    """Return a consumer's ledger."""
    return [Entry(row["number"], row["at"]) for row in await fetch(url, "select number, at from ledger")]


async def read_sum(url: str) -> int:
    """Return the sum of a bank's accounts."""
    [row] = await fetch(url, "select sum(amount)::bigint as amount from account")
    return int(row["amount"])


async def fetch(url: str, sql: str) -> list[asyncpg.Record]:
    """Run a statement on a separate connection."""
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(sql))
    finally:
        await connection.close()
