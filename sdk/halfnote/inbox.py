"""The inbox: runs a handler once for each message, in one database transaction with the message's row.

Halfnote delivers at least once. The message's row is written first; its primary key makes a concurrent second delivery
wait, and a later one find the row. The handler's writes and the row are committed together.
"""

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, TypeAlias

from halfnote.databases.base import AsyncDatabase, Database, require_kind, waits_for_another
from halfnote.errors import HalfnoteError, StillRunning
from halfnote.hosting import not_awaitable
from halfnote.ids import lowest_id
from halfnote.inbox_sql import InboxRow, InboxSql
from halfnote.message import Message

TABLE = "halfnote_inbox"
# Longer than the range of any replay. A dead letter that is redelivered after this time runs again.
KEEP = timedelta(days=90)

OnReplay: TypeAlias = Literal["skip", "run"]
Handler: TypeAlias = Callable[[Message, Any], Any]
AsyncHandler: TypeAlias = Callable[[Message, Any], Awaitable[Any]]


class Received(Enum):
    """The outcome of a received message."""

    DONE = "done"
    DUPLICATE = "duplicate"


class Reject(HalfnoteError):
    """Raised by a handler that can never accept a message, which becomes a dead letter at once with this reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        # Programs also pass an exception that they caught, or the name of a file that is not UTF-8, which no log takes.
        self.reason = str(reason).encode("utf-8", "replace").decode()


class Undone(HalfnoteError):
    """A handler returned, but its database transaction is over: the handler ended it, or hid an error that did."""

    def __init__(self, message: Message) -> None:
        super().__init__(
            f"the handler of message {message.message_id} ended its database transaction, or hid an error that did: "
            "let errors of the database, such as a deadlock, leave the handler"
        )


class _Rules:
    """The code that both inboxes share."""

    def __init__(self, sql: InboxSql, on_replay: OnReplay) -> None:
        if on_replay not in ("skip", "run"):
            raise ValueError(f"on_replay is `skip` or `run`, not {on_replay!r}")
        self._sql, self._on_replay = sql, on_replay

    def sql(self) -> str:
        """Return the table's definition, for migrations."""
        return self._sql.create

    def _row(self, message: Message) -> InboxRow:
        replay = message.replay if self._on_replay == "run" else None
        return InboxRow(message.message_id, replay or "", message.subscription)

    def _before(self, older_than: timedelta) -> str:
        return str(lowest_id(time.time() - older_than.total_seconds()))


class Inbox(_Rules):
    """An inbox with a plain driver. `consumer`: the name of this consumer; several may share one table.

    `on_replay`: `skip` runs a message only once; `run` runs it once more for each replay.
    """

    def __init__(self, database: Database, consumer: str, *, on_replay: OnReplay = "skip", table: str = TABLE) -> None:
        require_kind(database, asynchronous=False, user="Inbox")
        super().__init__(InboxSql(database.dialect, table, consumer), on_replay)
        self.database = database

    def receive(self, message: Message, handler: Handler) -> Received:
        """Run `handler(message, connection)` in one database transaction, unless it has run for the message before.

        `connection` is what the database's `begin` yields: a Session of SQLAlchemy, a DB-API connection, None with
        Django. An exception of the handler rolls back and is raised. The handler must not commit or roll back: after a
        commit of its own and an exception the message is a duplicate, and the rest of the work is never done. Raises
        Undone, and StillRunning if another run of the message goes on for longer than 3 s.
        """
        kept, row = False, self._row(message)
        with self.database.begin() as connection:
            with _waiting(message):
                is_first = self.database.within(connection, self._sql.receiving(row))
            if not is_first:
                return Received.DUPLICATE
            not_awaitable(handler(message, connection))
            if not self.database.within(connection, self._sql.standing(row)):
                raise Undone(message)
            kept = True
        if not kept:
            # The driver took an exception for a wish to roll back, as `psycopg.Rollback` is.
            raise Undone(message)
        return Received.DONE

    def create_table(self) -> None:
        """Make the table unless it is there."""
        self.database.run(self._sql.creating())

    def purge(self, older_than: timedelta = KEEP) -> int:
        """Delete what is known of older messages; return how many. They would run again if they came again."""
        return self.database.run(self._sql.purging(self._before(older_than)))


class AsyncInbox(_Rules):
    """The inbox with an asynchronous driver."""

    def __init__(
        self, database: AsyncDatabase, consumer: str, *, on_replay: OnReplay = "skip", table: str = TABLE
    ) -> None:
        require_kind(database, asynchronous=True, user="AsyncInbox")
        super().__init__(InboxSql(database.dialect, table, consumer), on_replay)
        self.database = database

    async def receive(self, message: Message, handler: AsyncHandler) -> Received:
        """Run `await handler(message, connection)` in one database transaction, unless it has run before.

        `connection` is what the database's `begin` yields: an AsyncSession of SQLAlchemy, a connection of asyncpg or
        psycopg. An exception of the handler rolls back and is raised. The handler must not commit or roll back, as with
        Inbox. Raises Undone, and StillRunning if another run of the message goes on for longer than 3 s.
        """
        kept, row = False, self._row(message)
        async with self.database.begin() as connection:
            with _waiting(message):
                is_first = await self.database.within(connection, self._sql.receiving(row))
            if not is_first:
                return Received.DUPLICATE
            await handler(message, connection)
            if not await self.database.within(connection, self._sql.standing(row)):
                raise Undone(message)
            kept = True
        if not kept:
            # The driver took an exception for a wish to roll back, as `psycopg.Rollback` is.
            raise Undone(message)
        return Received.DONE

    async def create_table(self) -> None:
        """Make the table unless it is there."""
        await self.database.run(self._sql.creating())

    async def purge(self, older_than: timedelta = KEEP) -> int:
        """Delete what is known of older messages; return how many. They would run again if they came again."""
        return await self.database.run(self._sql.purging(self._before(older_than)))


@contextmanager
def _waiting(message: Message) -> Iterator[None]:
    """Raise StillRunning if the message's row could not be written in time."""
    try:
        yield
    except Exception as error:
        if waits_for_another(error):
            raise StillRunning(message.message_id) from error
        raise
