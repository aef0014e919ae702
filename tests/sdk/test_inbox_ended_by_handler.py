"""Handlers whose database transaction is undone before they return, while a duplicate of the message is taken."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pymysql
import pytest
from halfnote.databases.django import Django
from halfnote.inbox import AsyncInbox, Inbox, Received, Undone
from halfnote.message import Message
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from tests.sdk.deadlocks import deadlocked
from tests.sdk.sites import INSERT, SITES, Site, execute_on_cursor
from tests.sdk.test_inbox import arrived

MARIADB = ["mariadb", "sqlalchemy-mariadb"]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MARIADB]
DRIVERS = [*(name for name in SITES if name not in MARIADB), *SLOW]


@pytest.fixture
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with SITES[request.param](tmp_path) as site:
        yield site


class Consumer:
    """A consumer's inbox at a site. Handlers run `work`, a plain function, with what executes a statement."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.asynchronous = asyncio.iscoroutinefunction(site.barrier.check_local)
        self.inbox: Any = (AsyncInbox if self.asynchronous else Inbox)(site.barrier.database, "points")

    def execute(self, connection: Any, sql: str) -> None:
        """Execute a statement in a plain handler's database transaction."""
        if isinstance(self.inbox.database, Django):
            from django.db import connections

            execute_on_cursor(connections[self.inbox.database._using], sql)
        elif self.site.name.startswith("sqlalchemy"):
            connection.execute(text(sql))
        else:
            execute_on_cursor(connection, sql)

    async def receive(self, message: Message, *statements: str | Message) -> Received:
        """Receive a message with a handler that executes statements; a message among them is received elsewhere."""

        async def handle_async(message: Message, connection: Any) -> None:
            for one in statements:
                if isinstance(one, Message):
                    assert await self.receive(one, INSERT.format(1)) is Received.DONE
                else:
                    await connection.execute(text(one) if self.site.name.startswith("sqlalchemy") else one)

        def handle(message: Message, connection: Any) -> None:
            for one in statements:
                if isinstance(one, Message):
                    duplicate = asyncio.run_coroutine_threadsafe(self.receive(one, INSERT.format(1)), loop)
                    assert duplicate.result(60) is Received.DONE
                else:
                    self.execute(connection, one)

        loop = asyncio.get_running_loop()
        return await self.call(self.inbox.receive, message, handle_async if self.asynchronous else handle)

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.site.call(function, *arguments)


@pytest.mark.parametrize("site", DRIVERS, indirect=True)
async def test_the_row_of_another_run_is_not_taken_for_its_own(site: Site) -> None:
    """The handler rolls back by a statement and goes on, in another database transaction."""
    consumer, one = Consumer(site), arrived(1)
    await consumer.call(consumer.inbox.create_table)
    with pytest.raises(Undone):
        await consumer.receive(one, "rollback", one, "begin", INSERT.format(2))
    assert site.orders() == [1]
    assert await consumer.receive(one, INSERT.format(3)) is Received.DUPLICATE


@pytest.mark.parametrize("site", DRIVERS, indirect=True)
async def test_a_run_whose_rollback_nobody_has_used_is_not_acknowledged(site: Site) -> None:
    consumer, one = Consumer(site), arrived(1)
    await consumer.call(consumer.inbox.create_table)
    with pytest.raises(Undone):
        await consumer.receive(one, "rollback", "begin", INSERT.format(2))
    assert site.orders() == []
    assert await consumer.receive(one, INSERT.format(3)) is Received.DONE


@pytest.mark.parametrize("site", DRIVERS, indirect=True)
async def test_what_a_handler_has_committed_is_acknowledged(site: Site) -> None:
    """The row was committed with it, so the message never runs again."""
    consumer, one = Consumer(site), arrived(1)
    await consumer.call(consumer.inbox.create_table)
    assert await consumer.receive(one, INSERT.format(1), "commit", "begin", INSERT.format(2)) is Received.DONE
    assert site.orders() == [1, 2]
    assert await consumer.receive(one, INSERT.format(3)) is Received.DUPLICATE


@pytest.mark.slow
@pytest.mark.parametrize("site", MARIADB, indirect=True)
async def test_a_table_that_is_made_in_a_savepoint_commits_the_row_too(site: Site) -> None:
    """MariaDB commits before each definition of a table, and forgets the savepoint."""
    consumer, one = Consumer(site), arrived(1)
    await consumer.call(consumer.inbox.create_table)
    made = ("savepoint one", INSERT.format(1), "create table notes (number int) engine = InnoDB", INSERT.format(2))
    assert await consumer.receive(one, *made) is Received.DONE
    assert site.orders() == [1, 2]
    assert await consumer.receive(one, INSERT.format(3)) is Received.DUPLICATE


@pytest.mark.slow
@pytest.mark.parametrize("site", MARIADB, indirect=True)
async def test_a_hidden_deadlock_does_not_take_a_message_twice(site: Site) -> None:
    """MariaDB rolls the row back with the rest; a duplicate is taken, and the handler writes once more."""
    consumer, one = Consumer(site), arrived(1)
    await consumer.call(consumer.inbox.create_table)
    errors = pymysql.err.OperationalError if site.name == "mariadb" else OperationalError
    with closing(connected(site)) as other:
        execute_on_cursor(other, "insert into orders values (1), (2), (3), (4), (5), (6)")
        other.commit()

        def hide(message: Message, connection: Any) -> None:
            deadlocked(lambda sql: consumer.execute(connection, sql), lambda: connected(site), other, (errors, "1213"))
            taken = consumer.inbox.receive(one, lambda _, duplicate: consumer.execute(duplicate, INSERT.format(1030)))
            assert taken is Received.DONE
            consumer.execute(connection, INSERT.format(1031))

        with pytest.raises(Undone, match="such as a deadlock"):
            await consumer.call(consumer.inbox.receive, one, hide)
    assert site.orders() == [1, 2, 3, 4, 5, 6, 1030]
    assert await consumer.receive(one, INSERT.format(1032)) is Received.DUPLICATE


def connected(site: Site) -> Any:
    """Return one more connection to a site's MariaDB."""
    database = site.barrier.database
    return database._connect() if site.name == "mariadb" else database.engine.raw_connection()
