"""What the browser tests of the console share. A module of tests has its own service and its own browser."""

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from playwright.sync_api import Browser

from tests.conftest import migrated_template
from tests.support import postgres
from tests.support.browser import chromium
from tests.support.console_world import World, answering
from tests.support.processes import serving


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, World]]:
    """The URL of a service, and what it shows."""
    dsn = postgres.create_database(migrated_template())
    with ExitStack() as stack:
        stack.callback(postgres.drop_database, dsn)
        url = stack.enter_context(serving(tmp_path_factory.mktemp("console"), dsn))
        other = stack.enter_context(answering())
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False))
        made = World(client, other)
        made.build()
        made.settle()
        yield url, made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium."""
    with chromium() as started:
        yield started
