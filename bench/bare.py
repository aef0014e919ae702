"""The bare client, the baseline of outgoing HTTP: httpx on the httpx-aiohttp transport, without further code."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport


@asynccontextmanager
async def bare_client(connections: int) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that keeps up to `connections` connections open and no cookies."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )
    async with httpx.AsyncClient(transport=AiohttpTransport(client=session), trust_env=False) as client:
        yield client
