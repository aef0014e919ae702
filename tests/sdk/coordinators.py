"""A coordinator for the client's tests with scripted answers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

Answer = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


def answer(status: int, content: Any = None, **headers: str) -> httpx.Response:
    """Return an answer in JSON; `_` in header names means `-`."""
    return httpx.Response(
        status,
        json=content if content is not None else {},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def problem(status: int, kind: str, detail: str = "no", **extra: Any) -> httpx.Response:
    """Return a refusal as the service gives it."""
    return httpx.Response(
        status,
        content=json.dumps({"type": f"/problems/{kind}", "title": kind, "status": status, "detail": detail, **extra}),
        headers={"content-type": "application/problem+json"},
    )


@dataclass
class Scripted:
    """Answers each path with its next answer and repeats the last one; `came` holds the requests."""

    answers: Mapping[str, list[Answer]] = field(default_factory=dict)
    came: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)

    def transport(self) -> httpx.MockTransport:
        """Return the transport of either kind of client."""
        return httpx.MockTransport(self._answer)

    def asked(self, path: str) -> list[Any]:
        """Return the contents of the requests to a path."""
        return [content for at, content in self.came if at == path]

    def ends(self) -> list[Any]:
        """Return the contents of all ends, also of those that were posted together."""
        together = {"/end": lambda content: [content], "/ends": lambda content: content["ends"]}
        return [end for at, content in self.came if at in together for end in together[at](content)]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        content = json.loads(request.content) if request.content else None
        self.came.append((request.url.path, content))
        self.headers.append(request.headers)
        known = self.answers.get(request.url.path)
        if known is None:
            return self._well(request.url.path, content)
        found = known.pop(0) if len(known) > 1 else known[0]
        if isinstance(found, Exception):
            raise found
        given = found(request) if callable(found) else found
        # A response belongs to one client; the same answer may go to several.
        return httpx.Response(given.status_code, headers=given.headers, content=given.content)

    def _well(self, path: str, content: Any) -> httpx.Response:
        """Answer as the service does where nothing is wrong."""
        if path == "/half":
            return answer(201, {"born_at": "2026-11-21T08:00:00Z", "first_check_at": "2026-11-21T08:00:06Z"})
        if path == "/end":
            return answer(_status_of(content), {"verdict": content["verdict"]})
        if path == "/ends":
            return answer(
                200, {"outcomes": [{"status": _status_of(end), "verdict": end["verdict"]} for end in content["ends"]]}
            )
        return answer(202)


def _status_of(end: Any) -> int:
    return 202 if end["verdict"] == "unknown" else 200
