"""The service behind a transport that refuses some of what a gateway asks for, as an overloaded service may."""

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

OVERLOADED = {"type": "/problems/overloaded", "title": "Too many requests are waiting", "status": 503}
INVALID = {"type": "/problems/handle-invalid", "title": "Not a handle of this subscription", "status": 422}


class RefusingService(httpx.AsyncBaseTransport):
    """Passes requests on. `outcomes`: by action, what is answered for handles that the service does not get to see.

    `whole` and `methods`: actions and HTTP methods that are answered 503. `before` and `after`: what is awaited before
    a request of an action goes on, and before its answer does.
    """

    def __init__(self, service: httpx.AsyncBaseTransport) -> None:
        self._service = service
        self.outcomes: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        self.whole: set[str] = set()
        self.methods: set[str] = set()
        self.before: dict[str, Callable[[], Awaitable[object]]] = {}
        self.after: dict[str, Callable[[], Awaitable[object]]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, in part by the service."""
        action = request.url.path.rpartition("/")[2]
        content = await request.aread()
        wanted = json.loads(content) if content else {}
        self.asked.append((action, wanted))
        if action in self.before:
            await self.before[action]()
        if action in self.whole or request.method in self.methods:
            return httpx.Response(503, json=OVERLOADED, request=request)
        refused = self.outcomes[action]
        handles = wanted.get("handles", [])
        if not any(handle in refused for handle in handles):
            answer = await self._service.handle_async_request(request)
            if action in self.after:
                await self.after[action]()
            return answer
        passed = [handle for handle in handles if handle not in refused]
        found = iter(await self._settled(request, {**wanted, "handles": passed}) if passed else [])
        outcomes = [refused[handle] if handle in refused else next(found) for handle in handles]
        return httpx.Response(200, json={"outcomes": outcomes}, request=request)

    async def _settled(self, request: httpx.Request, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        passed = httpx.Request(request.method, request.url, headers=headers, content=json.dumps(wanted))
        answer = await self._service.handle_async_request(passed)
        outcomes: list[dict[str, Any]] = json.loads(await answer.aread())["outcomes"]
        return outcomes
