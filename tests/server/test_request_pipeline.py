"""The fast path and the ordinary routes refuse the same bad requests by the same problems."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.datastructures import State
from starlette.types import ASGIApp, Message, Scope

from app.admission.authenticator import Authenticator
from app.admission.load_limits import LoadLimits
from app.admission.route_roles import PEOPLE
from app.errors import Invalid
from app.main import create_app
from app.permissions import Caller, Role
from app.runtime.state import Runtime
from app.server.request_pipeline import PipelineRoute, RequestPipeline
from tests.conftest import app_of, shares
from tests.support.api_keys import bearer, make

FAST, ORDINARY = ("POST", "/half"), ("POST", "/transactions/check")
JSON = {"content-type": "application/json"}
CHUNKED = {**JSON, "transfer-encoding": "chunked"}
LIMIT = 1024

# Name → (headers, body chunks, status, problem).
BAD: dict[str, tuple[dict[str, str], tuple[bytes, ...], int, str]] = {
    "a foreign host": ({**JSON, "host": "evil.example"}, (b"{}",), 421, "host-not-allowed"),
    "a host with a user": ({**JSON, "host": "evil@localhost"}, (b"{}",), 421, "host-not-allowed"),
    "a host with a path": ({**JSON, "host": "localhost/evil"}, (b"{}",), 421, "host-not-allowed"),
    "the host of Starlette's test client": ({**JSON, "host": "testserver"}, (b"{}",), 421, "host-not-allowed"),
    "an origin with a user": ({**JSON, "origin": "http://evil@localhost"}, (b"{}",), 403, "foreign-origin"),
    "a foreign origin": ({**JSON, "origin": "https://evil.example"}, (b"{}",), 403, "foreign-origin"),
    "another content type": ({"content-type": "text/plain", "content-length": "2"}, (b"{}",), 415, "content-type"),
    "an encoded body": ({**JSON, "content-encoding": "gzip"}, (b"{}",), 415, "content-encoding"),
    "no content type": ({"content-length": "2"}, (b"{}",), 415, "content-type"),
    "a length that is no number": ({**JSON, "content-length": "x"}, (b"{}",), 400, "bad-request"),
    "a length over the limit": ({**JSON, "content-length": str(LIMIT + 1)}, (), 413, "body-too-large"),
    "one chunk over the limit": (CHUNKED, (b" " * (LIMIT + 1),), 413, "body-too-large"),
    "chunks over the limit": (CHUNKED, (b" " * LIMIT, b" "), 413, "body-too-large"),
    "no key": ({**JSON, "authorization": ""}, (b"{}",), 401, "unauthenticated"),
    "an unknown key": ({**JSON, "authorization": "Bearer hn_0"}, (b"{}",), 401, "unauthenticated"),
    "no UTF-8": (JSON, (b'{"a":"\xff"}',), 400, "malformed-json"),
    "no JSON": (JSON, (b"{",), 400, "malformed-json"),
    "endless nesting": (CHUNKED, (b"[" * LIMIT,), 400, "malformed-json"),
    "an unknown field": (JSON, (b'{"surprise":1}',), 422, "invalid"),
}


@pytest.fixture
def app(runtime: Runtime, client: httpx.AsyncClient) -> ASGIApp:
    """The service with keys and small bodies."""
    return with_keys(runtime, client)


@pytest.fixture(scope="module")
def shared_app(shared_runtime: Runtime, shared_client: httpx.AsyncClient) -> ASGIApp:
    """The service with keys and small bodies, for requests that are refused."""
    return with_keys(shared_runtime, shared_client)


def with_keys(runtime: Runtime, client: httpx.AsyncClient) -> ASGIApp:
    """Make a process ask for keys and take small bodies; return its service."""
    runtime.settings = runtime.settings.model_copy(update={"auth": "keys", "body_limit_bytes": LIMIT})
    runtime.authenticator = Authenticator(runtime.settings, runtime.clock)
    runtime.guard.limit_bytes = LIMIT
    return app_of(client)


def scope_of(method: str, path: str, headers: dict[str, str]) -> Scope:
    """Return the scope of a request as a server makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()],
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
    }


class Exchange:
    """One request and what the service sent."""

    def __init__(self, *chunks: bytes) -> None:
        self.sent: list[Message] = []
        self._parts = self._messages(chunks)

    async def _messages(self, chunks: tuple[bytes, ...]) -> AsyncIterator[Message]:
        for chunk in chunks:
            yield {"type": "http.request", "body": chunk, "more_body": True}
        yield {"type": "http.request", "body": b"", "more_body": False}

    async def receive(self) -> Message:
        return await anext(self._parts)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and problem."""
        start, body = self.sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        assert headers["content-length"] == str(len(body["body"]))
        return start["status"], headers, json.loads(body["body"])


async def asked(app: ASGIApp, method: str, path: str, headers: dict[str, str], *chunks: bytes) -> Exchange:
    exchange = Exchange(*chunks)
    await app(scope_of(method, path, headers), exchange.receive, exchange.send)
    return exchange


@shares
@pytest.mark.parametrize(("headers", "chunks", "status", "slug"), BAD.values(), ids=BAD.keys())
async def test_both_paths_refuse_the_same(
    shared_app: ASGIApp,
    shared_runtime: Runtime,
    headers: dict[str, str],
    chunks: tuple[bytes, ...],
    status: int,
    slug: str,
) -> None:
    headers = {**bearer(await make(shared_runtime, Role.ADMIN)), **headers}
    if not headers["authorization"]:
        del headers["authorization"]
    fast, ordinary = [(await asked(shared_app, *path, headers, *chunks)).answer for path in (FAST, ORDINARY)]
    assert (fast[0], fast[2]["type"]) == (status, f"/problems/{slug}")
    if slug == "invalid":
        # The routes differ in their fields.
        assert [(one[0], one[2]["type"], one[2]["title"]) for one in (fast, ordinary)] == [
            (status, "/problems/invalid", fast[2]["title"])
        ] * 2
    else:
        assert fast == ordinary
    assert (shared_runtime.load_limits.in_flight, shared_runtime.load_limits.held_bytes) == (0, 0)


async def test_both_paths_refuse_a_role_and_an_overload_the_same_way(app: ASGIApp, runtime: Runtime) -> None:
    admin, scraper = await make(runtime, Role.ADMIN), await make(runtime, Role.METRICS)
    for path in (FAST, ORDINARY):
        refused, headers, problem = (await asked(app, *path, {**JSON, **bearer(scraper)}, b"{}")).answer
        assert (refused, problem["type"], problem["role"]) == (403, "/problems/forbidden", "metrics")
        assert headers["content-type"] == "application/problem+json"
    limits = {"in_flight_max": 0}, {"bodies_max_bytes": 1}, {"key_in_flight_max": 1}, {"key_rate_per_s": 0.001}
    for update, status in zip(limits, (503, 503, 429, 429), strict=True):
        answers = []
        for path in (FAST, ORDINARY):
            runtime.load_limits = LoadLimits(
                runtime.settings.model_copy(update=update), runtime.metrics.traffic.refused
            )
            # One request of this key is in flight, and its rate is used up.
            if status == 429:
                runtime.load_limits.take(runtime.authenticator.caller(b"Bearer " + admin.encode()))
            answers.append((await asked(app, *path, {**JSON, **bearer(admin)}, b"{}")).answer)
        assert answers[0] == answers[1]
        assert (answers[0][0], "retry-after" in answers[0][1]) == (status, True), update


async def test_both_paths_answer_the_same_before_the_service_has_started() -> None:
    app, inner = create_app()
    inner.state.runtime = None
    answers = [(await asked(app, *path, {**JSON, "host": "evil.example"}, b"{")).answer for path in (FAST, ORDINARY)]
    assert answers[0] == answers[1]
    assert (answers[0][0], answers[0][2]["type"], answers[0][1]["retry-after"]) == (503, "/problems/not-ready", "1")


@pytest.mark.parametrize(("method", "path"), [FAST, ORDINARY])
async def test_a_client_that_leaves_gets_no_answer_and_is_not_counted(
    app: ASGIApp, runtime: Runtime, method: str, path: str
) -> None:
    exchange = Exchange()

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    await app(scope_of(method, path, {**JSON, **bearer(await make(runtime, Role.ADMIN))}), leave, exchange.send)
    assert exchange.sent == []
    assert (runtime.load_limits.in_flight, counted(runtime)) == (0, {})


def counted(runtime: Runtime) -> dict[tuple[str, str], float]:
    """Return the requests counted, by route and status."""
    runtime.metrics.tallies.publish()
    [family] = [one for one in runtime.metrics.registry.collect() if one.name == "halfnote_requests"]
    return {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in family.samples
        if sample.name == "halfnote_requests_total"
    }


async def test_a_defect_counts_as_500_on_both_paths(runtime: Runtime) -> None:
    async def fails(runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> tuple[int, bytes]:
        raise ZeroDivisionError("a defect")

    pipeline, exchange = RequestPipeline(State({"runtime": runtime})), Exchange()
    await pipeline.run(PipelineRoute(fails, PEOPLE, "/fast"), scope_of(*FAST, JSON), exchange.receive, exchange.send)
    assert exchange.answer[0] == 500
    assert exchange.answer[2]["type"] == "/problems/internal"
    # The framework sends the answer itself, then raises.
    answered, scope = Exchange(), {**scope_of(*FAST, JSON), "route": type("Matched", (), {"path": "/ordinary/{id}"})}
    with pytest.raises(ZeroDivisionError):
        await pipeline.run(PipelineRoute(fails, PEOPLE, is_framework=True), scope, answered.receive, answered.send)
    assert answered.sent == []
    assert counted(runtime) == {("/fast", "500"): 1, ("/ordinary/{id}", "500"): 1}
    assert runtime.load_limits.in_flight == 0


async def test_a_problem_of_a_framework_call_is_sent(runtime: Runtime) -> None:
    async def refuses(runtime: Runtime, caller: Caller, body: bytes, trace: str | None) -> tuple[int, None]:
        raise Invalid("The body says nothing.", field="(body)")

    pipeline, exchange = RequestPipeline(State({"runtime": runtime})), Exchange()
    route = PipelineRoute(refuses, PEOPLE, is_framework=True)
    await pipeline.run(route, scope_of(*ORDINARY, JSON), exchange.receive, exchange.send)
    assert exchange.answer[0] == 422
    assert counted(runtime) == {("(none)", "422"): 1}
