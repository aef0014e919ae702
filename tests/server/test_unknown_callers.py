"""Callers without a key or a session take no part of the limits that all requests share: over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest

from app.console.asgi import SIGN_IN_FORM_BYTES
from app.database.connection import Connection
from app.permissions import new_key
from tests.server.own_settings import Start, started_by_need
from tests.server.raw_http import WITHIN_S, read_answer
from tests.support.console_forms import FORM, token_of
from tests.support.processes import Service

ADMIN = new_key()
KEYED = {"authorization": f"Bearer {ADMIN}"}
MOST = 64 * 1024
HALF = {"producer_group": "shop", "messages": [{"topic": "order", "body": "x" * 40_000}]}
ACT = "/console/subscriptions/mailer/do/pause"
SIGN_IN = "/console/sign-in"
SIGN_OUT = "/console/sign-out"
UNKNOWN = 24

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def keyed(dsn: str, db: Connection, tmp_path: Path) -> AsyncIterator[Start]:
    """Start the service with keys, with room for one large body, and with settings of its own."""
    usual = {"auth": "keys", "admin_key": ADMIN, "body_limit_bytes": MOST, "bodies_max_bytes": MOST}
    async with started_by_need(dsn, db, tmp_path, **usual) as start:
        yield start


def head(path: str, length: int, *headers: str) -> bytes:
    """Return the head of a form."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/x-www-form-urlencoded",
        f"Content-Length: {length}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@contextlib.asynccontextmanager
async def connected(service: Service) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    try:
        async with asyncio.timeout(WITHIN_S):
            yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def slow(service: Service, path: str, length: int, sent: int, count: int = UNKNOWN) -> AsyncIterator[list[Wire]]:
    """Connections that send a head and a part of the body, and then nothing."""
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected(service)) for _ in range(count)]
        for _, writer in wires:
            writer.write(head(path, length) + b"x" * sent)
            await writer.drain()
        yield wires


async def takes_halves(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=60, headers=KEYED) as client:
        for _ in range(5):
            answer = await client.post("/half", json=HALF)
            assert answer.status_code == 201, answer.text


async def signs_in(service: Service) -> None:
    """A form with the longest page to go on to is taken."""
    start = "/console/transactions?key="
    page = start + "%26" * ((1000 - len(start)) // 3)
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        form = await client.get(SIGN_IN, params={"next": page}, headers=FORM)
        fields = {"csrf": token_of(form), "key": ADMIN, "next": page}
        assert 1500 < len(urlencode(fields)) <= SIGN_IN_FORM_BYTES
        taken = await client.post(SIGN_IN, data=fields, headers=FORM)
        assert (taken.status_code, unescape(taken.headers["location"])) == (303, page)
        left = await client.post(SIGN_OUT, data={"csrf": token_of(await client.get("/console", headers=FORM))})
        assert (left.status_code, left.headers["location"]) == (303, SIGN_IN)


async def test_an_act_of_an_unknown_caller_is_answered_without_its_body(keyed: Start) -> None:
    service = await keyed()
    async with slow(service, ACT, MOST - 1, MOST - 100) as wires:
        await takes_halves(service)
        for reader, _ in wires:
            answer = await read_answer(reader)
            assert answer is not None
            assert answer.status == 303
            assert answer.headers["location"].startswith(f"{SIGN_IN}?")
            assert "undone=1" in answer.headers["location"]
        # The rest of the body is dropped, and the connection serves the next request.
        reader, writer = wires[0]
        writer.write(b"x" * 99 + b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        following = await read_answer(reader)
        assert following is not None
        assert following.status == 200


async def test_a_client_that_waits_is_not_asked_for_the_body_of_an_unknown_caller(keyed: Start) -> None:
    service = await keyed()
    for path, method in ((ACT, "POST"), ("/console/transactions", "PUT"), ("/console/none", "POST")):
        async with connected(service) as (reader, writer):
            begun = head(path, MOST, "Expect: 100-continue").replace(b"POST", method.encode(), 1)
            writer.write(begun)
            first = await reader.readline()
            assert first.split()[1] in (b"303", b"404", b"405"), (path, first)


@pytest.mark.parametrize("path", [SIGN_IN, SIGN_OUT])
async def test_slow_forms_of_a_sign_in_take_no_part_of_the_limits(keyed: Start, path: str) -> None:
    service = await keyed(in_flight_max=2)
    async with slow(service, path, SIGN_IN_FORM_BYTES, SIGN_IN_FORM_BYTES - 1):
        await takes_halves(service)
        await signs_in(service)


@pytest.mark.parametrize("path", [SIGN_IN, SIGN_OUT])
async def test_a_form_of_a_sign_in_is_small(keyed: Start, path: str) -> None:
    service = await keyed()
    async with slow(service, path, MOST, SIGN_IN_FORM_BYTES + 1, count=1) as ((reader, _),):
        answer = await read_answer(reader)
        assert answer is not None
        assert answer.status == 413
        assert f'"limit_bytes":{SIGN_IN_FORM_BYTES}'.encode() in answer.body
    await takes_halves(service)


async def test_slow_forms_of_a_sign_in_make_room_for_other_connections(keyed: Start) -> None:
    service = await keyed(connections_max=16)
    half = b'{"producer_group":"shop","messages":[{"topic":"order","body":1}]}'
    async with connected(service) as (producer, writer), contextlib.AsyncExitStack() as stack:
        # The body of a caller with a key is under way for as long.
        lines = ["POST /half HTTP/1.1", "Host: localhost", f"Authorization: Bearer {ADMIN}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(half)}", "Expect: 100-continue"]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        await is_asked_to_go_on(producer)
        for _ in range(3 * 16):
            reader, unknown = await stack.enter_async_context(connected(service))
            unknown.write(head(SIGN_IN, 100, "Expect: 100-continue"))
            await is_asked_to_go_on(reader)
            unknown.write(b"key=")
        await takes_halves(service)
        await signs_in(service)
        writer.write(half)
        answer = await read_answer(producer)
        assert answer is not None
        assert answer.status == 201


async def is_asked_to_go_on(reader: asyncio.StreamReader) -> None:
    """Read the answer that asks for the body, so the body is awaited."""
    assert (await reader.readline()).split()[1] == b"100"
    await reader.readline()
