"""What every test can use: a database of its own, a runtime over it, and the whole service over that."""

import asyncio
import atexit
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from app.config import LOOPBACK, Settings
from app.database import Connection, connect
from app.main import create_app
from app.migrate import migrate
from app.runtime import Runtime
from app.sealing import new_key
from app.start import assemble
from tests import pg
from tests.pg import data_dir, pytest_configure, pytest_unconfigure
from tests.scheduling import pytest_xdist_make_scheduler

# Secrets are sealed in every database that is migrated here; services that tests start get the same keys.
_made, _keys = tempfile.mkstemp(prefix="halfnote-test-", suffix=".keys")
os.write(_made, f"{new_key()}\n".encode())
os.close(_made)
atexit.register(os.unlink, _keys)
os.environ["HALFNOTE_SECRETS_KEY_FILE"] = _keys

__all__ = ["data_dir", "pytest_configure", "pytest_unconfigure", "pytest_xdist_make_scheduler"]


def migrated_template() -> str:
    """Make the migrated database that others are cloned from, once a run; return its name."""
    return pg.ensure_template("halfnote_template", lambda url: asyncio.run(migrate(url, days_ahead=7)))


@pytest.fixture
def dsn() -> Iterator[str]:
    """A migrated database of the test's own."""
    url = pg.create_database(migrated_template())
    yield url
    pg.drop_database(url)


@pytest.fixture
def settings(dsn: str) -> Settings:
    """Settings over the test's database, untouched by the environment's."""
    return Settings(_env_file=None, database_url=dsn, pool_size=8, linger_s=0, allow_networks=LOOPBACK)  # type: ignore[call-arg]


@pytest.fixture
async def runtime(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """The parts of one process over the test's database, with no loop running: tests take steps themselves."""
    async with AsyncExitStack() as stack:
        made = await assemble(settings, dsn, stack)
        # Tests change what is to be found and ask again.
        made.found.for_s = made.versions.for_s = 0.0
        yield made


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """The whole service's HTTP, in process."""
    async with client_of(runtime) as made:
        yield made


def client_of(runtime: Runtime) -> httpx.AsyncClient:
    """Return a client of the whole service over a runtime."""
    app, api = create_app()
    api.state.runtime = runtime
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://testserver")  # type: ignore[arg-type]


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Connection]:
    """A connection of the test's own, to look at the tables."""
    connection = await connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
async def group(db: Connection) -> str:
    """A registered producer group called `shop`."""
    await register_group(db, "shop")
    return "shop"


async def register_group(db: Connection, name: str, **columns: Any) -> None:
    """Write a producer group's row with RocketMQ's defaults, but for `columns`."""
    row: dict[str, Any] = {
        "check_urls": ["http://127.0.0.1:9/check"],
        "immunity_s": 6,
        "interval_s": 30,
        "max_checks": 15,
        "check_timeout_s": 5,
        "unanswered_park_s": 259_200,
        "on_exhausted": "rollback",
        "check_max_in_flight": 32,
        "ping_interval_s": 60,
        "secrets": '[{"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000", "expires_at": null}]',
        "check_window": 32,
        **columns,
    }
    names = ", ".join(row)
    marks = ", ".join(f"${index}" for index in range(2, len(row) + 2))
    await db.execute(
        f"insert into producer_group (name, created_at, updated_at, next_ping_at, {names}) "
        f"values ($1, now(), now(), now(), {marks})",
        name,
        *row.values(),
    )
