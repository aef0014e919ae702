"""Fixtures that the tests of the relay share."""

from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest

from app.runtime.state import Runtime
from tests.conftest import assembled, settings_of
from tests.support.faulty_proxy import FaultyProxy, through


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[FaultyProxy]:
    port = urlsplit(dsn).port
    assert port is not None
    async with FaultyProxy(port) as made:
        yield made


@pytest.fixture
async def worker(dsn: str, proxy: FaultyProxy) -> AsyncIterator[Runtime]:
    """A process whose connections to the database go through the proxy."""
    url = through(proxy, dsn)
    async with assembled(settings_of(url), url) as made:
        yield made
