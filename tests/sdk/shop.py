"""A shop's own database for the client's tests: orders, of which one with an unknown customer fails at the commit."""

import os

import psycopg
import pytest

SCHEMA = """
create table customer (number int primary key);
insert into customer values (1);
create table orders (
    number int primary key, customer int not null references customer deferrable initially deferred
);
"""
NOBODY = 99
# The URL of a database to take, where there is no service that could make one.
SHOP = "HALFNOTE_TESTS_SHOP"

_made: list[str] = []


def fresh(schema: str) -> str:
    """Return the URL of a Postgres database with this schema and nothing else.

    One a worker, emptied each time, which takes a fraction of making one; it goes with the run's server.
    """
    if not _made:
        _made.append(os.environ.get(SHOP) or _database())
    with psycopg.connect(_made[0]) as connection:
        # Connections that a failed test left open would lock the tables.
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
        connection.execute("drop schema public cascade; create schema public; " + schema)
    return _made[0]


@pytest.fixture
def shop() -> str:
    """The URL of a shop's Postgres database."""
    return fresh(SCHEMA)


def orders(url: str) -> list[int]:
    """Return the orders that were committed."""
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("select number from orders order by number").fetchall()]


def with_driver(url: str, driver: str) -> str:
    """Return the URL as SQLAlchemy wants it for a driver."""
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)


def _database() -> str:
    from tests.support import postgres

    return postgres.create_database()
