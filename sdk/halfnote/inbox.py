"""The inbox: runs a handler once for each message, in the same database transaction as what it does.

Halfnote delivers at least once. The message's row is written first; its primary key makes a second delivery that comes
at the same time wait, and one that comes later find it. What the handler writes and the row are committed together.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, TypeAlias

from halfnote.databases.base import AsyncDatabase, Database, Script
from halfnote.errors import HalfnoteError
from halfnote.hosting import not_awaitable
from halfnote.ids import lowest_id
from halfnote.inbox_sql import InboxSql
from halfnote.message import Message

TABLE = "halfnote_inbox"
# Longer than any replay reaches back; a dead letter that is redelivered later than this runs again.
KEEP = timedelta(days=90)

OnReplay: TypeAlias = Literal["skip", "run"]
Handler: TypeAlias = Callable[[Message, Any], Any]
AsyncHandler: TypeAlias = Callable[[Message, Any], Awaitable[Any]]


class Received(Enum):
    """What came of a message."""

    DONE = "done"
    DUPLICATE = "duplicate"


class Reject(HalfnoteError):
    """Raised by a handler that will never take a message: a dead letter at once, with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Undone(HalfnoteError):
    """A handler returned, but its database transaction is gone: it hid a failure that rolled back, or ended it."""

    def __init__(self, message: Message) -> None:
        super().__init__(f"the handler of message {message.message_id} left nothing of its database transaction")


class _Rules:
    """What both inboxes share."""

    def __init__(self, sql: InboxSql, on_replay: OnReplay) -> None:
        if on_replay not in ("skip", "run"):
            raise ValueError(f"on_replay is `skip` or `run`, not {on_replay!r}")
        self._sql, self._on_replay = sql, on_replay

    def sql(self) -> str:
        """Return the table's definition, for migrations."""
        return self._sql.create

    def _row(self, message: Message) -> tuple[str, str, str | None]:
        replay = message.replay if self._on_replay == "run" else None
        return message.message_id, replay or "", message.subscription

    def _standing(self, message: Message) -> Script[bool]:
        """Look for its row before the commit: some databases commit nothing, and report that as a success."""
        message_id, replay, _ = self._row(message)
        return self._sql.standing(message_id, replay)

    def _before(self, older_than: timedelta) -> str:
        return str(lowest_id(time.time() - older_than.total_seconds()))


class Inbox(_Rules):
    """An inbox with a plain driver. `consumer`: who takes messages here; several may share one table.

    `on_replay`: `skip` runs a message once, whatever brings it; `run` runs it once more for each replay, and only once.
    """

    def __init__(self, database: Database, consumer: str, *, on_replay: OnReplay = "skip", table: str = TABLE) -> None:
        super().__init__(InboxSql(database.dialect, table, consumer), on_replay)
        self.database = database

    def receive(self, message: Message, handler: Handler) -> Received:
        """Run `handler(message, connection)`, unless the message was taken before, in one database transaction.

        `connection` is what the database's `begin` yields: a Session of SQLAlchemy, a DB-API connection, None with
        Django. What the handler raises rolls back and is raised.
        """
        with self.database.begin() as connection:
            if not self.database.within(connection, self._sql.receiving(*self._row(message))):
                return Received.DUPLICATE
            not_awaitable(handler(message, connection))
            if not self.database.within(connection, self._standing(message)):
                raise Undone(message)
        return Received.DONE

    def create_table(self) -> None:
        """Make the table unless it is there."""
        self.database.run(self._sql.creating())

    def purge(self, older_than: timedelta = KEEP) -> int:
        """Delete what is known of older messages; return how many. They would run again if they came again."""
        return self.database.run(self._sql.purging(self._before(older_than)))


class AsyncInbox(_Rules):
    """The same with a driver that is awaited."""

    def __init__(
        self, database: AsyncDatabase, consumer: str, *, on_replay: OnReplay = "skip", table: str = TABLE
    ) -> None:
        super().__init__(InboxSql(database.dialect, table, consumer), on_replay)
        self.database = database

    async def receive(self, message: Message, handler: AsyncHandler) -> Received:
        """Run `await handler(message, connection)`, unless the message was taken before, in one database transaction.

        `connection` is what the database's `begin` yields: an AsyncSession of SQLAlchemy, a connection of asyncpg or
        psycopg. What the handler raises rolls back and is raised.
        """
        async with self.database.begin() as connection:
            if not await self.database.within(connection, self._sql.receiving(*self._row(message))):
                return Received.DUPLICATE
            await handler(message, connection)
            if not await self.database.within(connection, self._standing(message)):
                raise Undone(message)
        return Received.DONE

    async def create_table(self) -> None:
        """Make the table unless it is there."""
        await self.database.run(self._sql.creating())

    async def purge(self, older_than: timedelta = KEEP) -> int:
        """Delete what is known of older messages; return how many. They would run again if they came again."""
        return await self.database.run(self._sql.purging(self._before(older_than)))
