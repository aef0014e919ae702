"""Requests for which no connection could be opened: the answer says so, and is of the cause."""

from urllib.parse import urlsplit

import asyncpg
import pytest
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

from app.database.connection import Database, NoConnection, PoolShare, connect
from app.database.errors import problem_of
from tests.support.faulty_proxy import FaultyProxy, through

TEXT = "The database could not be connected in time; repeat later."


async def refuse(dsn: str, *, refuses: bool = True) -> None:
    """Have the server refuse new connections to a database, or take them again."""
    parts = urlsplit(dsn)
    # The server does not allow it on a connection to the database itself.
    other = await connect(parts._replace(path="/postgres").geturl())
    try:
        await other.execute(f'alter database "{parts.path[1:]}" allow_connections {not refuses}')
    finally:
        await other.close()


@pytest.mark.parametrize(("how", "sqlstate"), [("refuses", "55000"), ("is gone", "")])
async def test_a_request_of_the_pool_says_that_the_database_could_not_be_connected(
    dsn: str, how: str, sqlstate: str
) -> None:
    async with FaultyProxy(urlsplit(dsn).port or 5432) as left:
        gone = through(left, dsn)
    if how == "refuses":
        await refuse(dsn)
    database = Database(dsn if how == "refuses" else gone, pool_size=1)
    try:
        with pytest.raises((NoConnection, DBAPIError)) as failed:
            async with PoolShare(database, 1).connection():
                raise AssertionError("there is no connection")
    finally:
        await database.close()
    with capture_logs() as lines:
        problem = problem_of(failed.value)
    assert (problem.status, problem.detail) == (503, TEXT)
    assert [(line["event"], line["sqlstate"]) for line in lines] == [("not_connected", sqlstate)]


@pytest.mark.parametrize(
    ("cause", "slug"),
    [
        (asyncpg.CannotConnectNowError("the database system is starting up"), "database-read-only"),
        (asyncpg.TooManyConnectionsError("sorry, too many clients already"), "database-unavailable"),
        (asyncpg.InvalidParameterValueError("of the session"), "database-unavailable"),
        (TimeoutError(), "database-unavailable"),
        (ZeroDivisionError(), "internal"),
    ],
)
def test_the_problem_of_a_connection_that_was_not_opened_is_of_its_cause(cause: Exception, slug: str) -> None:
    error = NoConnection("no connection")
    error.__cause__ = cause
    assert problem_of(error).slug == slug
