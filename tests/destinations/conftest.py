"""Fixtures of the destinations' tests."""

from collections.abc import AsyncIterator

import pytest

from app.egress.http_client import EgressClient
from tests.support.webhooks import egress_client


@pytest.fixture
async def http_client() -> AsyncIterator[EgressClient]:
    """Yield an HTTP client like the service's."""
    async with egress_client() as opened:
        yield opened
