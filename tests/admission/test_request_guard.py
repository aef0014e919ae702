"""Bad input on every route: which problem answers it, and how much of the body is read."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from starlette.types import ASGIApp, Message

from app.errors import all_problems
from app.ids import uuid7
from app.main import api
from app.runtime.state import Runtime
from tests.conftest import app_of, shares
from tests.coordinator.test_half_end import ORDER, post_half

ROOT = Path(__file__).parents[2]
ID = "0193a7d6-a5c8-7b1e-8f00-1030a1030a10"
VALUES = {
    **{"transaction_id": ID, "message_id": f"{ID}-0", "name": "nobody", "subscription": "nobody"},
    **{
        "slug": "invalid",
        "replay_id": "1",
        "day": "2026-11-20",
        "finding_id": "1030",
        "kind": "parked",
        "key_id": "1030",
    },
}
ROUTES = sorted(
    (method.upper(), path.format(**VALUES)) for path, methods in api.openapi()["paths"].items() for method in methods
)
WRITING = [(method, path) for method, path in ROUTES if method != "GET"]
WITH_BODY = sorted(
    (method.upper(), path.format(**VALUES))
    for path, methods in api.openapi()["paths"].items()
    for method, described in methods.items()
    if described.get("requestBody", {}).get("required")
)
JSON = {"content-type": "application/json"}


def refused(answer: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    """Hold that an answer is a problem of this type; return it."""
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["type"]) == (status, f"/problems/{slug}"), (answer.request.url, problem)
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    return problem


@shares
async def test_a_foreign_host_is_not_answered(shared_client: httpx.AsyncClient) -> None:
    for method, path in ROUTES:
        for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "[::2]", "a b"):
            refused(await shared_client.request(method, path, headers={"host": host}), 421, "host-not-allowed")
    for host in ("localhost:1234", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert (await shared_client.get("/transactions", headers={"host": host})).status_code == 200


@shares
async def test_a_page_of_another_origin_is_refused(shared_client: httpx.AsyncClient) -> None:
    for method, path in WRITING:
        for origin in ("https://evil.example", "null", "http://localhost.evil.example"):
            answer = await shared_client.request(method, path, content=b"{}", headers={**JSON, "origin": origin})
            refused(answer, 403, "foreign-origin")
    half = {"producer_group": "shop", "messages": [ORDER]}
    answer = await shared_client.post("/half", json=half, headers={"origin": "http://localhost:8080"})
    assert answer.status_code == 201


@shares
async def test_only_json_is_read(shared_client: httpx.AsyncClient) -> None:
    wrong = (
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "application/json; charset=latin-1",
    )
    for method, path in WRITING:
        for content_type in wrong:
            answer = await shared_client.request(method, path, content=b"{}", headers={"content-type": content_type})
            refused(answer, 415, "content-type")
        refused(await shared_client.request(method, path, content=b"{}"), 415, "content-type")


MALFORMED = {
    "empty object cut short": b"{",
    "no JSON": b"commit",
    "NaN": b'{"reason":NaN}',
    "Infinity": b'{"reason":-Infinity}',
    "lone surrogate": b'{"reason":"\\ud800"}',
    "surrogates the wrong way round": b'{"reason":"\\ude00\\ud83d"}',
    "not UTF-8": b'{"reason":"\xff"}',
    "UTF-8 of a surrogate": b'{"reason":"\xed\xa0\x80"}',
    "UTF-16": '{"reason":1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "NUL between": b'{"reason":\x001}',
    "a raw control character": b'{"reason":"a\nb"}',
    "a trailing comma": b'{"reason":1,}',
    "two values": b"{} {}",
    "a comment": b"{} // x",
    "bottomless nesting": b'{"reason":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nesting without end": b'{"a":' * 100_000,
}


@shares
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_json_is_refused_on_every_route(shared_client: httpx.AsyncClient, body: bytes) -> None:
    for method, path in WRITING:
        refused(await shared_client.request(method, path, content=body, headers=JSON), 400, "malformed-json")


@shares
@pytest.mark.parametrize("value", [b"1" + b"0" * 5000, b"-" + b"9" * 4301, b"[1" + b"0" * 5000 + b"]"])
async def test_numbers_of_too_many_digits_are_invalid_on_every_route(
    shared_client: httpx.AsyncClient, value: bytes
) -> None:
    """They are JSON, but Python makes no integer of more than 4,300 digits."""
    assert len(WITH_BODY) > 20
    for method, path in WITH_BODY:
        content = b'{"reason":%b}' % value
        refused(await shared_client.request(method, path, content=content, headers=JSON), 422, "invalid")


@shares
async def test_nesting_that_only_the_framework_finds_too_deep_is_malformed_too(
    shared_client: httpx.AsyncClient,
) -> None:
    """The framework reads a body deeper in the stack than the check before it."""
    for depth in range(850, 1001, 10):
        content = b'{"reason":' + b"[" * depth + b"]" * depth + b"}"
        for path in ("/transactions/verdict", f"/transactions/{ID}/verdict"):
            answer = await shared_client.post(path, content=content, headers=JSON)
            refused(answer, answer.status_code, {400: "malformed-json", 422: "invalid"}[answer.status_code])


@shares
@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\\uDBFF"', b'"\\\\\\ud800ab"'])
async def test_half_a_surrogate_pair_at_the_end_is_named(shared_client: httpx.AsyncClient, text: bytes) -> None:
    for path in ("/half", "/transactions/verdict"):
        answer = await shared_client.post(path, content=b'{"producer_group":%b}' % text, headers=JSON)
        assert "surrogate pair has only its first half" in refused(answer, 400, "malformed-json")["detail"]


@shares
@pytest.mark.parametrize("content", [b'{"a":"\\\\ud800"', b'{"a":"', b'{"a":"\\n', b'{"a":"%bud83d"' % (b"\\" * 20)])
async def test_a_body_that_is_cut_is_not_called_half_a_pair(shared_client: httpx.AsyncClient, content: bytes) -> None:
    answer = await shared_client.post("/half", content=content, headers=JSON)
    assert "surrogate" not in refused(answer, 400, "malformed-json")["detail"]


@shares
@pytest.mark.parametrize("value", [b"NaN", b'"\\ud800"', b"[" * 100_000 + b"]" * 100_000, b'"\xff"', b"1."])
async def test_bodies_and_contexts_must_be_json_too(shared_client: httpx.AsyncClient, value: bytes) -> None:
    message = b'{"topic":"order","body":%s}' % value
    for content in (
        b'{"producer_group":"shop","messages":[%s]}' % message,
        b'{"producer_group":"shop","messages":[{"topic":"order","body":1}],"context":%s}' % value,
    ):
        refused(await shared_client.post("/half", content=content, headers=JSON), 400, "malformed-json")


async def raw_call(
    app: ASGIApp, method: str, path: str, headers: dict[str, str], chunks: AsyncIterator[bytes]
) -> tuple[int, dict[str, Any]]:
    """Call the service as a server does, with a body in chunks that it reads one by one."""
    sent: list[Message] = []

    async def receive() -> Message:
        chunk = await anext(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    async def send(message: Message) -> None:
        sent.append(message)

    head = {"host": "localhost", "content-type": "application/json", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in head.items()],
        "server": ("localhost", 80),
        "client": ("127.0.0.1", 1),
    }
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(part.get("body", b"") for part in sent[1:]))


@shares
async def test_a_body_over_the_limit_is_not_read_to_its_end(
    shared_client: httpx.AsyncClient, shared_runtime: Runtime
) -> None:
    app = app_of(shared_client)
    limit, size = shared_runtime.settings.body_limit_bytes, 65_536
    asked = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b" " * size

    for method, path in WRITING:
        asked = 0
        length = {"content-length": str(5 * 1024 * 1024)}
        status, problem = await raw_call(app, method, path, length, endless())
        assert (status, problem["type"], asked) == (413, "/problems/body-too-large", 0), path
        status, problem = await raw_call(app, method, path, {"transfer-encoding": "chunked"}, endless())
        assert (status, problem["limit_bytes"]) == (413, limit), path
        assert asked == limit // size + 1, path


@shares
@pytest.mark.parametrize("length", ["-1", "1e3", "x", ""])
async def test_a_length_that_is_no_number(shared_client: httpx.AsyncClient, length: str) -> None:
    app = app_of(shared_client)

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    for method, path in WRITING:
        status, problem = await raw_call(app, method, path, {"content-length": length}, nothing())
        assert (status, problem["type"]) == (400, "/problems/bad-request"), path


@shares
async def test_unknown_fields_are_named_on_every_route(shared_client: httpx.AsyncClient) -> None:
    for method, path in WRITING:
        operation = next(
            methods[method.lower()]
            for template, methods in api.openapi()["paths"].items()
            if template.format(**VALUES) == path and method.lower() in methods
        )
        if "requestBody" not in operation:
            continue
        answer = await shared_client.request(method, path, json={**_least(operation), "surprise": 1})
        assert refused(answer, 422, "invalid")["field"].endswith("surprise"), path


def _least(operation: dict[str, Any]) -> dict[str, Any]:
    """Return the example of an operation's request."""
    content = operation["requestBody"]["content"]["application/json"]
    if "example" in content:
        return dict(content["example"])
    if "examples" in content:
        return dict(next(iter(content["examples"].values()))["value"])
    schema = api.openapi()["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
    if schema.get("examples"):
        return dict(schema["examples"][0])
    return {
        name: field["examples"][0] if "examples" in field else field.get("enum", ["x"])[0]
        for name, field in schema["properties"].items()
        if name in schema["required"]
    }


@shares
async def test_paths_and_methods_that_are_not(shared_client: httpx.AsyncClient) -> None:
    refused(await shared_client.get("/nowhere"), 404, "not-found")
    refused(await shared_client.get("/transactions/nobody"), 404, "not-found")
    for path in ("/half", "/end", "/messages", "/halves", "/ends", "/transactions/check"):
        answer = await shared_client.get(path)
        refused(answer, 405, "method-not-allowed")
        assert answer.headers["allow"] == "POST"
    answer = await shared_client.post("/producer-groups/shop", json={})
    refused(answer, 405, "method-not-allowed")
    assert set(answer.headers["allow"].split(", ")) == {"GET", "PUT", "PATCH", "DELETE"}


def half(**fields: Any) -> dict[str, Any]:
    return {"producer_group": "shop", "messages": [ORDER], **fields}


def message(**fields: Any) -> dict[str, Any]:
    return half(messages=[{**ORDER, **fields}])


@shares
@pytest.mark.parametrize("path", ["/half", "/messages"])
@pytest.mark.parametrize(
    ("request_body", "slug", "field"),
    [
        (half(messages=[]), "invalid", "messages"),
        (half(messages=[ORDER] * 101), "invalid", "messages"),
        (half(messages=[{**ORDER, "surprise": 1}]), "invalid", "messages[0].surprise"),
        (half(producer_group="a\x00b"), "invalid", "producer_group"),
        (half(producer_group=""), "invalid", "producer_group"),
        (half(producer_group="nobody"), "group-unregistered", "producer_group"),
        (half(transaction_id=str(uuid4())), "invalid", "transaction_id"),
        (half(transaction_id="order-1030"), "invalid", "transaction_id"),
        (message(topic="halfnote.finding"), "topic-reserved", "messages[0].topic"),
        (message(topic="a\x00"), "invalid", "messages[0].topic"),
        (message(topic="x" * 256), "invalid", "messages[0].topic"),
        (message(key="a\x1f"), "invalid", "messages[0].key"),
        (message(tag="\x7f"), "invalid", "messages[0].tag"),
        (message(headers={"a": "x\r\ny: z"}), "invalid", "messages[0].headers.a"),
        (message(headers={"a b": "x"}), "invalid", "messages[0].headers"),
        (message(headers={"A": "x", "a": "y"}), "invalid", "messages[0].headers"),
        (message(headers={"a": "x" * 8192}), "invalid", "messages[0].headers"),
        (message(content_type="text/plain"), "invalid", "messages[0].content_type"),
        (message(content_type="application/json;\r\nx: y"), "invalid", "messages[0].content_type"),
        (message(body_base64="AA=="), "invalid", "messages[0].body"),
        (half(messages=[{"topic": "order"}]), "invalid", "messages[0].body"),
        (half(messages=[{"topic": "order", "body_base64": "A"}]), "invalid", "messages[0].body_base64"),
        (half(messages=[{"topic": "order", "body_base64": "not base64!"}]), "invalid", "messages[0].body_base64"),
        (message(deliver_after_s=-1), "invalid", "messages[0].deliver_after_s"),
        (message(deliver_after_s=40 * 86_400 + 1), "invalid", "messages[0].deliver_after_s"),
    ],
)
async def test_a_bad_half_names_its_field(
    shared_client: httpx.AsyncClient, path: str, request_body: dict[str, Any], slug: str, field: str
) -> None:
    answer = await shared_client.post(path, content=json.dumps(request_body), headers=JSON)
    assert refused(answer, 422, slug)["field"] == field


@shares
@pytest.mark.parametrize(
    ("context", "status"),
    [
        (b"1e400", 422),
        (b"1" * 5000, 422),
        (b'"\\u0000"', 422),
        (b'{"a\\u0000":1}', 422),
        (b'"' + b"x" * 4096 + b'"', 422),
        (b'"\\\\u0000"', 201),
        (b'"' + b"x" * 4094 + b'"', 201),
        (b'{"a":1,"a":2}', 201),
    ],
)
async def test_contexts_that_cannot_be_kept(shared_client: httpx.AsyncClient, context: bytes, status: int) -> None:
    content = b'{"producer_group":"shop","messages":[{"topic":"order","body":1}],"context":%s}' % context
    answer = await shared_client.post("/half", content=content, headers=JSON)
    assert answer.status_code == status, answer.text
    if status == 422:
        assert refused(answer, 422, "invalid")["field"] == "context"


@shares
async def test_ids_six_minutes_off(shared_client: httpx.AsyncClient, shared_runtime: Runtime) -> None:
    for shift_ms in (-360_000, 360_000):
        chosen = UUID(int=uuid7(shared_runtime.clock.now()).int + (shift_ms << 80))
        for path in ("/half", "/messages"):
            answer = await shared_client.post(path, json=half(transaction_id=str(chosen)))
            problem = refused(answer, 422, "id-time-skew")
            assert {"coordinator_time", "id_time", "skew_s"} <= set(problem)


@shares
async def test_of_two_equal_keys_the_last_one_counts(shared_client: httpx.AsyncClient) -> None:
    made = (await post_half(shared_client)).json()["transaction_id"]
    content = '{"verdict":"commit","reason":"x","verdict":"rollback","force":true,"reason":"y"}'
    answer = await shared_client.post(f"/transactions/{made}/verdict", content=content, headers=JSON)
    assert answer.json()["verdict"] == "rollback"
    content = f'{{"transaction_id":"{made}","producer_group":"other","producer_group":"shop","verdict":"rollback"}}'
    assert (await shared_client.post("/end", content=content, headers=JSON)).status_code == 200


@shares
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"transaction_id": "x"}, "transaction_id"),
        ({"producer_group": "\x00"}, "producer_group"),
        ({"verdict": "maybe"}, "verdict"),
        ({"from_check": 1}, "from_check"),
        ({"reason": "a\x00"}, "reason"),
        ({"reason": "x" * 1001}, "reason"),
    ],
)
async def test_a_bad_end_names_its_field(shared_client: httpx.AsyncClient, fields: dict[str, Any], field: str) -> None:
    end = {"transaction_id": ID, "producer_group": "shop", "verdict": "commit", **fields}
    answer = await shared_client.post("/end", json=end)
    assert refused(answer, 422, "invalid")["field"] == field


@shares
async def test_each_problem_type_leads_to_its_explanation(shared_client: httpx.AsyncClient) -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    for problem in all_problems():
        answer = await shared_client.get(f"/problems/{problem.slug}")
        assert answer.status_code == 200
        assert answer.text.startswith(f"{problem.status} {problem.title}")
        assert f"## {problem.slug}\n" in page


def test_the_page_of_errors_is_made_from_the_code() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "errors_page"], capture_output=True, check=True, text=True
    )
    assert made.stdout == (ROOT / "docs" / "errors.md").read_text()
