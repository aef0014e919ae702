"""A service that asks for API keys, with settings of the test's own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import pytest_asyncio

from app.config import LOOPBACK, Settings
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of
from tests.support.api_keys import bearer

ORDER = {"producer_group": "shop", "messages": [{"topic": "order", "body": {"order": 1030}}]}
CONFIGURED = "hn_" + "a1B2c3D4" * 8


def settings_of(dsn: str, **fields: Any) -> Settings:
    known = {
        "database_url": dsn,
        "pool_size": 4,
        "linger_s": 0,
        "auth": "keys",
        "admin_key": CONFIGURED,
        "allow_networks": LOOPBACK,
    }
    return Settings(_env_file=None, **{**known, **fields})


@pytest.fixture
async def start(dsn: str) -> AsyncIterator[Callable[..., Any]]:
    """Start a process over the test's database, with settings of its own."""
    async with AsyncExitStack() as stack:

        async def started(**fields: Any) -> tuple[Runtime, httpx.AsyncClient]:
            runtime = await stack.enter_async_context(assembled(settings_of(dsn, **fields), dsn))
            client = await stack.enter_async_context(client_of(runtime))
            client.headers.update(bearer(CONFIGURED))
            return runtime, client

        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_admin(shared_dsn: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the configured admin's key over the module's database, for requests that are refused."""
    async with assembled(settings_of(shared_dsn), shared_dsn) as runtime, client_of(runtime) as client:
        client.headers.update(bearer(CONFIGURED))
        yield client


async def made(client: httpx.AsyncClient, role: str = "metrics", **fields: Any) -> dict[str, Any]:
    answer = await client.post("/api-keys", json={"name": "grafana", "role": role, **fields})
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return dict(answer.json())


async def status(client: httpx.AsyncClient, key: str, path: str = "/metrics") -> int:
    return (await client.get(path, headers=bearer(key))).status_code
