"""What every test can use: a database of its own, a runtime over it, and the whole service over that."""

import asyncio
import atexit
import functools
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import hypothesis
import pytest
import pytest_asyncio
import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp

from app.config import LOOPBACK, Settings
from app.database.connection import Connection, connect
from app.database.url_file import checked_url
from app.lifecycle.startup import assemble
from app.main import create_app
from app.migrate import migrate
from app.runtime.state import Runtime
from app.secrets.key_file import new_key
from app.secrets.vault import GROUP_SECRETS
from tests.support import postgres
from tests.support.examples import examples
from tests.support.garbage import pytest_collection, pytest_collection_finish
from tests.support.pool_guard import lend_one_at_a_time
from tests.support.postgres import data_dir, pytest_configure, pytest_unconfigure
from tests.support.selection import (
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from tests.support.trust import pytest_runtest_logstart
from tests.support.type_introspection import remember_types
from tests.support.unclosed import pytest_runtest_makereport
from tests.support.vaults import vault
from tests.support.xdist_scheduling import pytest_xdist_make_scheduler

# No test asserts a time, so Hypothesis does not either: a busy machine would fail it.
hypothesis.settings.register_profile("halfnote", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("halfnote")

remember_types()
lend_one_at_a_time()

# A shell without job control starts a program in the background so that it ignores Ctrl-C. So would what tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where no service has set up its log, structlog draws a traceback with all variables: half a CPU second for each.
*_first, _ = structlog.get_config()["processors"]
_plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*_first, _plain])

# Secrets are sealed in every database that is migrated here; services that tests start get the same keys.
_made, _keys = tempfile.mkstemp(prefix="halfnote-test-", suffix=".keys")
os.write(_made, f"{new_key()}\n".encode())
os.close(_made)
atexit.register(os.unlink, _keys)
os.environ["HALFNOTE_SECRETS_KEY_FILE"] = _keys

__all__ = [
    "data_dir",
    "pytest_collection",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_runtest_logstart",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
    "pytest_unconfigure",
    "pytest_xdist_make_scheduler",
]


DAYS_AHEAD = 2


def migrated_template() -> str:
    """Make the migrated database that others are cloned from, once a run; return its name.

    It has few days, because Postgres plans each statement for the partitions of all days. A run that begins before
    midnight still has tomorrow's after it.
    """
    return postgres.ensure_template("halfnote_template", lambda url: asyncio.run(migrate(url, days_ahead=DAYS_AHEAD)))


@pytest.fixture
def dsn() -> Iterator[str]:
    """A migrated database of the test's own."""
    url = postgres.create_database(migrated_template())
    yield url
    postgres.drop_database(url)


@pytest.fixture
def settings(dsn: str) -> Settings:
    """Settings over the test's database, untouched by the environment's."""
    return settings_of(dsn)


def settings_of(dsn: str, **fields: Any) -> Settings:
    """Return the settings of a test's process over a database, untouched by the environment's."""
    url = checked_url(dsn)
    if fields or url is None:
        return Settings(_env_file=None, database_url=dsn, **{**_OF_TESTS, **fields})
    # Reading settings takes 5 ms of CPU, and these differ in nothing but the database.
    environment = frozenset((name, value) for name, value in os.environ.items() if name.startswith("HALFNOTE_"))
    return _usual_settings(environment).model_copy(update={"database_url": url})


_OF_TESTS: dict[str, Any] = {"pool_size": 8, "linger_s": 0, "allow_networks": LOOPBACK}


@functools.cache
def _usual_settings(environment: frozenset[tuple[str, str]]) -> Settings:
    """Return the settings of tests that change none, in an environment."""
    return Settings(_env_file=None, database_url="postgresql://127.0.0.1/none", **_OF_TESTS)


@pytest.fixture
async def runtime(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """The parts of one process over the test's database, with no loop running: tests take steps themselves."""
    async with assembled(settings, dsn) as made:
        yield made


@asynccontextmanager
async def assembled(settings: Settings, dsn: str) -> AsyncIterator[Runtime]:
    """The parts of one process over a database, with no loop running."""
    async with AsyncExitStack() as stack:
        made = await assemble(settings, dsn, stack)
        # Tests change what is to be found and ask again.
        made.found.for_s = made.versions.for_s = 0.0
        yield made
    if id(made) in _lent:
        _free.append(_lent.pop(id(made)))


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """The whole service's HTTP, in process."""
    async with client_of(runtime) as made:
        yield made


# Making an app takes a third of a CPU second, and all that it keeps is its runtime: tests use one after another.
_free: list[tuple[ASGIApp, FastAPI]] = []
_lent: dict[int, tuple[ASGIApp, FastAPI]] = {}


def client_of(runtime: Runtime) -> httpx.AsyncClient:
    """Return a client of the whole service over a runtime; clients over the same runtime share an app."""
    if id(runtime) not in _lent:
        _lent[id(runtime)] = _free.pop() if _free else create_app()
    app, api = _lent[id(runtime)]
    api.state.runtime = runtime
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


def app_of(client: httpx.AsyncClient) -> ASGIApp:
    """Return the service that a client calls in process."""
    assert isinstance(client._transport, httpx.ASGITransport)
    return client._transport.app


# A test with this mark runs in its module's event loop and can use the shared fixtures below.
shares = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def shared_dsn() -> Iterator[str]:
    """A migrated database of the module, for requests that are refused or only read: it has the group `shop`."""
    url = postgres.create_database(migrated_template())
    yield url
    postgres.drop_database(url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime(shared_dsn: str, shared_db: Connection) -> AsyncIterator[Runtime]:
    """The parts of one process over the module's database; tests leave them as they were."""
    async with assembled(settings_of(shared_dsn), shared_dsn) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_client(shared_runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """The whole service's HTTP over the module's database."""
    async with client_of(shared_runtime) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_db(shared_dsn: str) -> AsyncIterator[Connection]:
    """A connection to the module's database."""
    connection = await connect(shared_dsn)
    await register_group(connection, "shop")
    yield connection
    await connection.close()


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
    secrets = [{"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000", "expires_at": None}]
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
        "secrets": json.dumps(vault().seal(GROUP_SECRETS, name, secrets)),
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
