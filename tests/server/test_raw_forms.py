"""Raw requests over real sockets: which are served, which are refused, and what they have done."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio
import uvicorn
from uvicorn.server import ServerState

from app.database.connection import Connection
from app.server.http_protocol import HttpProtocol
from tests.conftest import app_of, shares
from tests.server.raw_forms import OK, Form, Route, raw_forms
from tests.server.raw_http import converse, read_answer
from tests.support.requirements import absent

TOPIC = "raw"
BODY = json.dumps({"producer_group": "shop", "messages": [{"topic": TOPIC, "body": {"n": 1}}]}).encode()
# The first is answered by the fast path, the second by the framework.
ROUTES = {
    "fast path": Route(b"POST", b"/messages", BODY),
    "framework": Route(b"PUT", b"/topics/" + TOPIC.encode(), BODY),
}
FORMS = {name: raw_forms(route) for name, route in ROUTES.items()}
KINDS = list(dict.fromkeys(form.kind for form in FORMS["fast path"]))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(shared_client: httpx.AsyncClient) -> AsyncIterator[int]:
    """Where the service is served."""
    config, state = uvicorn.Config(app_of(shared_client), lifespan="off", ws="none", log_config=None), ServerState()
    config.load()
    server = await asyncio.get_running_loop().create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def effects(db: Connection, route: str) -> int:
    """Return how many messages the fast path has committed, or whether the framework has declared the topic."""
    if route == "fast path":
        sql = "select count(*) from outbox where topic = $1"
    else:
        sql = "select count(*) from topic where name = $1 and declared_at is not null"
    found: int = await db.fetchval(sql, TOPIC)
    return found


async def outcome(port: int, db: Connection, route: str, form: Form) -> tuple[list[int], int]:
    """Send a form; return the statuses of the answers, the last for the probe, and the number of effects."""
    await db.execute("update topic set declared_at = null where name = $1", TOPIC)
    before = await effects(db, route)
    answers = await converse(port, form.pieces, len(form.statuses), open_after=form.is_open)
    for answer in answers:
        if answer.status >= 300:
            assert answer.headers["content-type"] == "application/problem+json", answer
            assert json.loads(answer.body)["status"] == answer.status
    return [OK if answer.status < 300 else answer.status for answer in answers], await effects(db, route) - before


def expected(route: str, form: Form) -> tuple[list[int], int]:
    """Return what a form's outcome must be."""
    statuses = [*form.statuses, *([OK] if form.is_open else [])]
    # To declare a topic again changes nothing.
    return statuses, form.effects if route == "fast path" else min(form.effects, 1)


@shares
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
async def test_raw_forms_are_served_or_refused(port: int, shared_db: Connection, route: str, kind: str) -> None:
    forms = [form for form in FORMS[route] if form.kind == kind]
    found = {form.name: await outcome(port, shared_db, route, form) for form in forms}
    assert found == {form.name: expected(route, form) for form in forms}


# Longer forms test sizes. They take too many pieces.
CUT_MAX_BYTES = 2000


def by_byte(raw: bytes) -> list[bytes]:
    return [raw[at : at + 1] for at in range(len(raw))]


def by_line(raw: bytes) -> list[bytes]:
    return re.split(rb"(?<=\n)", raw)


def within_line_ends(raw: bytes) -> list[bytes]:
    return re.split(rb"(?<=\r)", raw)


@pytest.mark.slow
@shares
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("cut", [by_byte, by_line, within_line_ends])
async def test_the_pieces_of_a_form_change_nothing(
    port: int, shared_db: Connection, route: str, kind: str, cut: Callable[[bytes], list[bytes]]
) -> None:
    cuts = [
        replace(form, pieces=tuple(cut(raw)))
        for form in FORMS[route]
        if form.kind == kind and len(raw := b"".join(form.pieces)) < CUT_MAX_BYTES
    ]
    found = {form.name: await outcome(port, shared_db, route, form) for form in cuts}
    assert found == {form.name: expected(route, form) for form in cuts}


@shares
async def test_the_refusal_of_a_head_request_has_no_content(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"HEAD /livez HTTP/1.1\r\n\r\n")
    answer = await read_answer(reader, has_body=False)
    assert answer is not None
    assert answer.status == 400
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@shares
@pytest.mark.parametrize("path", ["/livez", "/readyz"])
async def test_a_probe_by_head_gets_the_answer_of_get_without_content(port: int, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    answer = await read_answer(reader, has_body=False)
    # What follows is the next answer: no content is between them.
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    whole = await read_answer(reader)
    assert answer is not None
    assert whole is not None
    assert answer.status == whole.status == 200
    assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


@shares
async def test_a_refused_client_that_still_sends_gets_the_answer(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    # More than the socket buffers hold, so that the server has unread bytes when it refuses.
    writer.write(b"GET /livez HTTP/1.1\r\nX-Fill: " + b"f" * 20_000_000)
    answer = await read_answer(reader)
    assert answer is not None
    assert answer.status == 431
    assert await reader.read() == b""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@shares
@pytest.mark.parametrize("path", ["/half", "/messages"])
async def test_curl_offers_http2(port: int, path: str) -> None:
    """The second request goes over the connection of the first."""
    if shutil.which("curl") is None:
        absent("curl is not installed here", "MACHINE")
    url = f"http://127.0.0.1:{port}{path}"
    sent = ["-H", "content-type: application/json", "-d", BODY.decode(), url, url]
    shown = ["-sS", "--http2", "-o", "/dev/null", "-w", "%{http_version} %{http_code} %{num_connects}\n"]
    made = await asyncio.create_subprocess_exec("curl", *shown, *sent, stdout=asyncio.subprocess.PIPE)
    printed, _ = await made.communicate()
    assert printed.decode().splitlines()[0] == "1.1 201 1"
    assert "1.1 201 0" in printed.decode()
