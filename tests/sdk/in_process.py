"""The real service in this process, for the client's tests."""

import asyncio

import httpx

from app.runtime.state import Runtime
from tests.conftest import app_of, client_of


def service(runtime: Runtime) -> httpx.ASGITransport:
    """Return the real service over a runtime, for an async client."""
    return httpx.ASGITransport(app=app_of(client_of(runtime)))


class FromThreads(httpx.BaseTransport):
    """The same for a sync client on another thread, while the loop of this one runs the service."""

    def __init__(self, transport: httpx.ASGITransport) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def sent() -> httpx.Response:
            inner = httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
            answer = await self._transport.handle_async_request(inner)
            return httpx.Response(answer.status_code, headers=answer.headers, content=await answer.aread())

        return asyncio.run_coroutine_threadsafe(sent(), self._loop).result(60)
