"""How many bytes of bodies one process holds at once: counted as they come, given back however a request ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.admission.load_limits import LoadLimits
from app.admission.request_guard import ClientGone, read_body
from app.config import Settings
from app.runtime.state import Runtime
from tests.admission.test_request_guard import JSON, WRITING, raw_call
from tests.coordinator.test_half_end import ORDER

CHUNK = 65_536
MOST = 4 * CHUNK


@pytest.fixture
def held(runtime: Runtime) -> Runtime:
    """A service that holds four chunks of bodies at most."""
    roomy = runtime.settings.model_copy(update={"bodies_max_bytes": MOST, "body_limit_bytes": MOST})
    runtime.load_limits = LoadLimits(roomy, runtime.metrics.traffic.refused)
    return runtime


async def test_without_room_it_is_503_and_with_it_served_again(
    held: Runtime, client: httpx.AsyncClient, group: str
) -> None:
    half = {"producer_group": group, "messages": [ORDER]}
    held.load_limits.hold(MOST - 10)
    for method, path in WRITING:
        answer = await client.request(method, path, json=half)
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/overloaded"), path
        assert answer.headers["retry-after"] == "1"
    # A request without a body takes no bytes of the limit.
    assert (await client.get("/transactions")).status_code == 200
    held.load_limits.release(MOST - 10)
    assert (await client.post("/half", json=half)).status_code == 201
    assert (held.load_limits.held_bytes, held.load_limits.in_flight) == (0, 0)


async def test_a_body_is_counted_while_it_comes(held: Runtime, client: httpx.AsyncClient, group: str) -> None:
    app: Any = client._transport.app  # type: ignore[attr-defined]
    whole = json.dumps({"producer_group": group, "messages": [{**ORDER, "body": "x" * (3 * CHUNK)}]}).encode()
    go_on = asyncio.Event()

    async def in_two() -> AsyncIterator[bytes]:
        yield whole[:-CHUNK]
        await go_on.wait()
        yield whole[-CHUNK:]

    async def at_once() -> AsyncIterator[bytes]:
        yield whole

    chunked = {"transfer-encoding": "chunked"}
    waiting = asyncio.create_task(raw_call(app, "POST", "/half", chunked, in_two()))
    async with asyncio.timeout(60):
        while held.load_limits.held_bytes < len(whole) - CHUNK:
            await asyncio.sleep(0.001)
    status, problem = await raw_call(app, "POST", "/half", chunked, at_once())
    assert (status, problem["type"]) == (503, "/problems/overloaded")
    assert held.load_limits.held_bytes == len(whole) - CHUNK
    go_on.set()
    assert (await waiting)[0] == 201
    assert (await raw_call(app, "POST", "/half", chunked, at_once()))[0] == 201
    assert held.load_limits.held_bytes == 0


async def test_refused_and_aborted_bodies_release_their_bytes(held: Runtime, client: httpx.AsyncClient) -> None:
    async def breaks_off() -> AsyncIterator[Any]:
        yield {"type": "http.request", "body": b" " * CHUNK, "more_body": True}
        yield {"type": "http.request", "body": b" " * CHUNK, "more_body": True}
        yield {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await read_body(aiter(breaks_off()).__anext__, held.guard, held.load_limits)
    assert held.load_limits.held_bytes == 0
    for method, path in WRITING:
        for content, status in ((b"{", 400), (b" " * (5 * 1024 * 1024), 413)):
            assert (await client.request(method, path, content=content, headers=JSON)).status_code == status, path
            assert held.load_limits.held_bytes == 0, path


def test_a_single_body_must_have_room() -> None:
    with pytest.raises(ValidationError, match="HALFNOTE_BODIES_MAX_BYTES"):
        Settings(_env_file=None, body_limit_bytes=2048, bodies_max_bytes=1024)  # type: ignore[call-arg]
