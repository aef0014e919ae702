"""Kills the shop at a step that the request names, by SIGKILL, like a power failure. Nothing is cleaned up."""

import os
import signal
from contextvars import ContextVar

import httpx

HEADER = "x-dies-at"

_dies_at: ContextVar[str | None] = ContextVar("dies_at", default=None)
# The name of each request to Halfnote among the steps.
_STEPS = {"/half": "half", "/end": "end", "/messages": "send"}


def dies_at(step: str | None) -> None:
    """Let the current request die at a step, such as `after commit`."""
    _dies_at.set(step)


def at(step: str) -> None:
    """Die if this is the step."""
    if _dies_at.get() == step:
        die()


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


class Deadly(httpx.AsyncBaseTransport):
    """Carries requests to Halfnote, with a step before each is sent and a step after its answer."""

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request, unless this process dies before."""
        step = _STEPS.get(request.url.path, request.url.path)
        at(f"before {step}")
        answer = await self._inner.handle_async_request(request)
        await answer.aread()
        at(f"after {step}")
        return answer

    async def aclose(self) -> None:
        """Close its connections."""
        await self._inner.aclose()
