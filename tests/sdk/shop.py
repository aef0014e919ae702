"""A shop's own database for the client's tests: orders, of which one with an unknown customer fails at the commit."""

from collections.abc import Iterator

import psycopg
import pytest

from tests import pg

SCHEMA = """
create table customer (number int primary key);
insert into customer values (1);
create table orders (
    number int primary key, customer int not null references customer deferrable initially deferred
);
"""
NOBODY = 99


@pytest.fixture
def shop() -> Iterator[str]:
    """The URL of a shop's Postgres database."""
    url = pg.create_database()
    with psycopg.connect(url) as connection:
        connection.execute(SCHEMA)
    yield url
    pg.drop_database(url)


def orders(url: str) -> list[int]:
    """Return the orders that were committed."""
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("select number from orders order by number").fetchall()]


def with_driver(url: str, driver: str) -> str:
    """Return the URL as SQLAlchemy wants it for a driver."""
    return url.replace("postgresql://", f"postgresql+{driver}://", 1)
