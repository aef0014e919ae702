"""A service's database connections: a small pool that measures how long its connections were held."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

SIZE = 5
PATIENCE_S = 2.0


class PoolEmpty(Exception):
    """No connection was free within PATIENCE_S."""


class Pool:
    """`held_s`: connection-seconds so far; `refused`: how often no connection became free in time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool: asyncpg.Pool | None = None
        self.held_s = 0.0
        self.refused = 0

    async def open(self) -> None:
        """Connect; call this first."""
        self._pool = await asyncpg.create_pool(self._url, min_size=1, max_size=SIZE)

    async def close(self) -> None:
        """Close all connections."""
        assert self._pool is not None
        await self._pool.close()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        """Yield a connection. Raises PoolEmpty."""
        assert self._pool is not None
        try:
            connection = await self._pool.acquire(timeout=PATIENCE_S)
        except TimeoutError:
            self.refused += 1
            raise PoolEmpty("all database connections are in use") from None
        began = time.monotonic()
        try:
            yield connection
        finally:
            self.held_s += time.monotonic() - began
            await self._pool.release(connection)
