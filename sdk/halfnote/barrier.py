"""The barrier: a row in the producer's own database that makes every check-back answer correct, without a listener.

The local database transaction writes one row beside its business rows (`enter`). A check inserts the same key with the
reason `rollback`, unless it exists, and reads the reason that is stored. The primary key makes the check wait for a
local transaction that is still open, and makes a local transaction after the check fail (BarrierRefused). So the answer
is correct at any time, unlike a check that only reads whether the order exists.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from halfnote.barrier_sql import BarrierSql
from halfnote.databases.base import (
    AsyncDatabase,
    Database,
    Script,
    is_to_be_tried_again,
    require_kind,
    waits_for_another,
)
from halfnote.errors import BarrierRefused
from halfnote.ids import lowest_id
from halfnote.listener import CheckedTransaction
from halfnote.lock_limit import longest_wait_s
from halfnote.time_limits import within
from halfnote.transaction import Transaction
from halfnote.verdicts import Verdict

log = logging.getLogger("halfnote")

TABLE = "halfnote_barrier"
# The longest time that Halfnote keeps an undecided transaction: a day goes HALFNOTE_MAX_RETENTION_S (45 days) after its
# end, so its first transaction is 46 days old by then. The rest is for upkeep, and for the clocks.
KEEP = timedelta(days=47)
# Less than a producer group's `check_timeout_s`, so that the answer still comes.
WAIT_S = 3.0
# What asking an asynchronous database may take besides, such as the wait for a connection of a full pool. Blocks that
# hold all of them would wait for each other for ever.
CONNECTED_IN_S = 1.0
# In MySQL two checks that waited for the same local transaction may deadlock when it is rolled back.
TRIES = 5
# An id contains the time of the machine that made it, which may be 5 min off, and a half may be repeated for a while.
_SKEW = timedelta(hours=1)
MISSING_ROW = (
    "transaction %s has no row in the barrier, and its half does not say that its block enters the barrier by itself. "
    "The answer is `unknown`: its database transaction may be open, or rolled back, or committed without "
    "`barrier.enter`. Use `producer.begin`, which enters by itself"
)


class _Rules:
    """The code that both barriers share. `keep`: older rows may have been purged, so their checks answer UNKNOWN."""

    def __init__(self, sql: BarrierSql, keep: timedelta) -> None:
        self._sql, self._keep = sql, keep

    def sql(self) -> str:
        """Return the table's definition, for migrations."""
        return self._sql.create

    def entering(self, transaction: Transaction | UUID, settle: Callable[[UUID], Any]) -> Script[None]:
        """Write the transaction's row. Raises BarrierRefused.

        If the local work fails, this barrier's `settle` is the source of the outcome.
        """
        transaction_id = transaction if isinstance(transaction, UUID) else transaction.transaction_id
        if isinstance(transaction, Transaction):
            transaction.settle = partial(settle, transaction_id)
        if not (yield from self._sql.entering(str(transaction_id))):
            raise BarrierRefused(transaction_id, (yield from self._sql.recorded(str(transaction_id))))
        if isinstance(transaction, Transaction):
            transaction.entered = True

    def dropping(self, transaction_id: UUID) -> Script[None]:
        """Let every check answer rollback, although the database transaction that has the row commits."""
        return self._sql.dropping(str(transaction_id))

    def standing(self, transaction_id: UUID) -> Script[bool]:
        """Read whether the transaction has its row, in the database transaction that may have written it."""
        return self._sql.standing(str(transaction_id))

    def _checking(self, transaction: CheckedTransaction) -> Callable[[], Script[Verdict]]:
        # A row that refuses later local work would roll back an order whose block never entered.
        refuse = transaction.barrier and transaction.age_s <= self._keep.total_seconds()
        sql = self._sql
        if transaction.within_s is not None:
            sql = replace(sql, wait_s=min(sql.wait_s, transaction.within_s))
        return partial(sql.checking, str(transaction.transaction_id), refuse=refuse)

    def _answer(self, transaction: CheckedTransaction, verdict: Verdict) -> Verdict:
        if verdict is Verdict.UNKNOWN and not transaction.barrier:
            log.warning(MISSING_ROW, transaction.transaction_id)
        return verdict

    def _reading(self, transaction_id: UUID) -> Callable[[], Script[Verdict]]:
        return partial(self._sql.checking, str(transaction_id), refuse=False)

    def _purging(self, older_than: timedelta | None) -> Script[int]:
        """Raises ValueError if `older_than` is less than `keep`."""
        age = self._keep if older_than is None else older_than
        if age < self._keep:
            raise ValueError(f"rows must be kept for {self._keep}: without its row, a commit is answered with rollback")
        return self._sql.purging(str(lowest_id(time.time() - (age + _SKEW).total_seconds())))

    def exporting(self, after: UUID, before: UUID, limit: int) -> Script[list[tuple[str, str]]]:
        """Read a page of transaction ids and reasons between two ids, for the ledger."""
        return self._sql.exporting(str(after), str(before), limit)


class Barrier(_Rules):
    """A barrier with a plain driver. Also a listener: `CheckEndpoint(barrier, …)`.

    `table` may contain a schema. `keep`: how long rows are kept, at least as long as Halfnote keeps undecided
    transactions: two days more than its HALFNOTE_MAX_RETENTION_S.
    `wait_s`: how long a check waits for a local transaction that is still open, before it answers `unknown`; less for
    one of many in one call.
    """

    def __init__(
        self, database: Database, *, table: str = TABLE, keep: timedelta = KEEP, wait_s: float = WAIT_S
    ) -> None:
        require_kind(database, asynchronous=False, user="Barrier")
        super().__init__(BarrierSql(database.dialect, table, wait_s), keep)
        self.database = database

    def enter(self, connection: Any, transaction: Transaction | UUID) -> None:
        """Write the transaction's row in the caller's open database transaction.

        `connection`: a Session or Connection of SQLAlchemy, a DB-API connection, None with Django. Raises
        BarrierRefused, on which the database transaction must be rolled back, or NotInTransaction.
        """
        _note_call(transaction)
        self.database.within(connection, self.entering(transaction, self.settle))

    def check_local(self, transaction: CheckedTransaction) -> Verdict:
        """Return the outcome of the local database transaction; UNKNOWN while it is still open."""
        return self._answer(transaction, self._outcome(self._checking(transaction)))

    def settle(self, transaction_id: UUID) -> Verdict:
        """Return the outcome after the local work raised, and refuse a later `enter` of the transaction."""
        return self._outcome(partial(self._sql.checking, str(transaction_id), refuse=True))

    def drop(self, transaction_id: UUID) -> None:
        """Let every later check answer rollback, although the local work is committed: its messages are dropped."""
        if self.settle(transaction_id) is Verdict.COMMIT:
            self.database.run(self.dropping(transaction_id))

    def read(self, transaction_id: UUID) -> Verdict:
        """Return the outcome that the row shows; UNKNOWN without a row. Nothing is written."""
        return self._outcome(self._reading(transaction_id))

    def create_table(self) -> None:
        """Make the table unless it is there."""
        self.database.run(self._sql.creating())

    def purge(self, older_than: timedelta | None = None) -> int:
        """Delete the rows of transactions older than this (default: `keep`); return how many. Raises ValueError."""
        return self.database.run(self._purging(older_than))

    def _outcome(self, script: Callable[[], Script[Verdict]]) -> Verdict:
        for tried in range(1, TRIES + 1):
            try:
                return self.database.run(script())
            except Exception as error:
                if waits_for_another(error):
                    return Verdict.UNKNOWN
                if tried == TRIES or not is_to_be_tried_again(error):
                    raise
        raise AssertionError("unreachable")


class AsyncBarrier(_Rules):
    """The barrier with an asynchronous driver."""

    def __init__(
        self, database: AsyncDatabase, *, table: str = TABLE, keep: timedelta = KEEP, wait_s: float = WAIT_S
    ) -> None:
        require_kind(database, asynchronous=True, user="AsyncBarrier")
        super().__init__(BarrierSql(database.dialect, table, wait_s), keep)
        self.database = database

    def enter(self, connection: Any, transaction: Transaction | UUID) -> Coroutine[Any, Any, None]:
        """Write the transaction's row in the caller's open database transaction. It must be awaited.

        `connection`: an AsyncSession or AsyncConnection of SQLAlchemy, a connection of asyncpg or psycopg. Raises
        BarrierRefused, on which the database transaction must be rolled back, or NotInTransaction.
        """
        # At the call, not at the await, so that the end of the block can name a missing `await`.
        _note_call(transaction)
        return self._enter(connection, transaction)

    async def _enter(self, connection: Any, transaction: Transaction | UUID) -> None:
        await self.database.within(connection, self.entering(transaction, self.settle))

    async def check_local(self, transaction: CheckedTransaction) -> Verdict:
        """Return the outcome of the local database transaction; UNKNOWN while it is still open."""
        found = await self._outcome(self._checking(transaction), transaction.within_s)
        return self._answer(transaction, found)

    async def settle(self, transaction_id: UUID) -> Verdict:
        """Return the outcome after the local work raised, and refuse a later `enter` of the transaction."""
        return await self._outcome(partial(self._sql.checking, str(transaction_id), refuse=True))

    async def drop(self, transaction_id: UUID) -> None:
        """Let every later check answer rollback, although the local work is committed: its messages are dropped."""
        if await self.settle(transaction_id) is Verdict.COMMIT:
            await self.database.run(self.dropping(transaction_id))

    async def read(self, transaction_id: UUID) -> Verdict:
        """Return the outcome that the row shows; UNKNOWN without a row. Nothing is written."""
        return await self._outcome(self._reading(transaction_id))

    async def create_table(self) -> None:
        """Make the table unless it is there."""
        await self.database.run(self._sql.creating())

    async def purge(self, older_than: timedelta | None = None) -> int:
        """Delete the rows of transactions older than this (default: `keep`); return how many. Raises ValueError."""
        return await self.database.run(self._purging(older_than))

    async def _outcome(self, script: Callable[[], Script[Verdict]], within_s: float | None = None) -> Verdict:
        most_s = float("inf") if within_s is None else within_s
        limit_s = longest_wait_s(self._sql.dialect, min(self._sql.wait_s, most_s)) + min(CONNECTED_IN_S, most_s)
        try:
            return await within(limit_s, self._tried(script))
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer of the barrier's database within {limit_s:g} s") from None

    async def _tried(self, script: Callable[[], Script[Verdict]]) -> Verdict:
        for tried in range(1, TRIES + 1):
            try:
                return await self.database.run(script())
            except Exception as error:
                if waits_for_another(error):
                    return Verdict.UNKNOWN
                if tried == TRIES or not is_to_be_tried_again(error):
                    raise
        raise AssertionError("unreachable")


def _note_call(transaction: Transaction | UUID) -> None:
    """Record a call of `enter`. Raises ValueError in a block that enters by itself."""
    if isinstance(transaction, UUID):
        return
    if transaction.enters:
        raise ValueError("this block enters the barrier by itself: leave out `barrier.enter`")
    transaction.entering = True
