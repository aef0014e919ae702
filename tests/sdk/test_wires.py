"""Transports of the asynchronous producer over real sockets: an httpx transport, and aiohttp."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from halfnote import COMMIT, Outgoing, TransactionProducer, async_driver
from halfnote.aiohttp_wire import AiohttpWire
from halfnote.async_driver import AsyncDriver, HttpxWire, Wire
from halfnote.exchange import Exchange, NoAnswer, Request, Response, Wait, asked
from halfnote.http import headers_of

from tests.sdk.servers import running
from tests.support.ports import free_port

HEADERS = headers_of("hn_key")
ANSWER = b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=["aiohttp", "httpx"])
async def wire_to(request: pytest.FixtureRequest) -> AsyncIterator[Callable[[str], Wire]]:
    """Makes a wire of each kind to a URL."""
    made: list[Wire] = []

    def wire(url: str) -> Wire:
        if request.param == "aiohttp":
            made.append(AiohttpWire(url, HEADERS))
        else:
            made.append(HttpxWire(url, HEADERS, httpx.AsyncHTTPTransport()))
        return made[-1]

    yield wire
    for one in made:
        await one.aclose()


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Read each request to its end, then act as the test says; yield the URL and the requests."""
    response: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        response.append(head + await reader.readexactly(length))
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", response


async def test_an_answer_comes_back_whole(wire_to: Callable[[str], Wire]) -> None:
    async def busy(writer: asyncio.StreamWriter) -> None:
        writer.write(ANSWER)
        await writer.drain()

    async with listening(busy) as (url, response):
        answer = await wire_to(url).ask(Request("POST", "/half", b"{}", 60, {"traceparent": "00-1-2-01"}))
        assert isinstance(answer, Response)
        assert (answer.status, answer.content, answer.headers["retry-after"]) == (503, b"{}", "7")
        await wire_to(url).ask(Request("PUT", "/producer-groups/a%2Fb", b"{}", 60))
    first, second = (request.decode().lower() for request in response)
    assert first.startswith("post /half http/1.1\r\n")
    assert second.startswith("put /producer-groups/a%2fb http/1.1\r\n")
    for name, value in {**HEADERS, "traceparent": "00-1-2-01"}.items():
        assert f"\r\n{name}: {value.lower()}\r\n" in first
    assert first.count("content-type") == first.count("user-agent") == 1


async def test_a_refused_connection_means_nothing_was_sent(wire_to: Callable[[str], Wire]) -> None:
    response = await wire_to(f"http://127.0.0.1:{free_port()}").ask(Request("POST", "/half", b"{}", 60))
    assert isinstance(response, NoAnswer)
    assert not response.sent
    assert response.error


async def test_a_connection_that_is_lost_may_have_brought_it(wire_to: Callable[[str], Wire]) -> None:
    async def nothing(writer: asyncio.StreamWriter) -> None:
        """It is closed then."""

    async with listening(nothing) as (url, response):
        lost = await wire_to(url).ask(Request("POST", "/half", b"{}", 60))
    assert isinstance(lost, NoAnswer)
    assert lost.sent
    assert len(response) == 1


async def test_an_answer_that_does_not_come_in_time(wire_to: Callable[[str], Wire]) -> None:
    over = asyncio.Event()

    async def silence(writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with listening(silence) as (url, _):
        late = await wire_to(url).ask(Request("POST", "/half", b"{}", 0.2))
        over.set()
    assert isinstance(late, NoAnswer)
    assert late.sent
    assert late.error.startswith("no answer within 0.2 s (")


@pytest.mark.filterwarnings("ignore:Sending a large body")
@pytest.mark.parametrize("part", ["answer", "request"])
async def test_a_request_has_its_time_as_a_whole(wire_to: Callable[[str], Wire], part: str) -> None:
    """An answer that comes in small parts; and one that is not read, so that the write waits."""
    goes_on = asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if part == "answer":
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while not goes_on.is_set():
                writer.write(b" ")
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(goes_on.wait(), 0.02)
        await goes_on.wait()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0, limit=1024)
    async with server:
        wire = wire_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        request = Request("POST", "/half", b" " * (2 if part == "answer" else 20_000_000), 0.3)
        late = await asyncio.wait_for(wire.ask(request), 60)
        goes_on.set()
    assert isinstance(late, NoAnswer)
    assert late.sent
    assert late.error.startswith("no answer within 0.3 s (")


async def test_aiohttp_is_taken_where_it_is_installed_and_no_transport_is_given() -> None:
    for transport, kind in ((None, AiohttpWire), (httpx.MockTransport(lambda _: httpx.Response(200)), HttpxWire)):
        driver = AsyncDriver("http://127.0.0.1:9", HEADERS, transport)
        assert isinstance(driver._current().wire, kind)
        await driver.close(0)


@pytest.mark.parametrize("by", ["aiohttp", "httpx"])
# Python warns of the connections that such a loop leaves open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loop_that_is_closed_in_the_midst_of_a_send_harms_no_later_one(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _close_a_loop_in_the_midst_of_a_send(by, monkeypatch)
    # It goes now, and is not blamed on another test.
    gc.collect()


def _close_a_loop_in_the_midst_of_a_send(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_driver, "find_spec", lambda name: find_spec(name) if by == "aiohttp" else None)
    response: list[str] = []
    over = threading.Event()

    class Answering(BaseHTTPRequestHandler):
        """Answers all but the first, which is held until all is over."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answer."""
            self.rfile.read(int(self.headers["content-length"]))
            response.append(self.path)
            if len(response) == 1:
                over.wait()
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    class Shop:
        async def execute_local(self, transaction: Any, arg: Any) -> Any:
            return COMMIT

        def check_local(self, transaction: Any) -> Any:
            raise AssertionError

    async def sent() -> str:
        async with producer:
            return (await producer.send(Outgoing("order", 1030))).end

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    with running(server) as port:
        producer = TransactionProducer(f"http://127.0.0.1:{port}", group="shop", listener=Shop())
        loop = asyncio.new_event_loop()
        sending = loop.create_task(producer.send(Outgoing("order", 1030)))
        while not response:
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        assert not sending.done()
        del sending
        assert asyncio.run(sent()) == "recorded"
        over.set()
    assert response == ["/half", "/half", "/end"]


def test_two_loops_keep_their_own_connections_and_their_own_background() -> None:
    callers = set[Any]()
    ended: list[str] = []

    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answer."""
            self.rfile.read(int(self.headers.get("content-length", 0)))
            callers.add(self.client_address)
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    def later() -> Exchange[None]:
        yield Wait(0.2)
        ended.append("later")

    async def in_background() -> None:
        assert driver.later(later())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    with running(server) as port, closing(asyncio.new_event_loop()) as one, closing(asyncio.new_event_loop()) as other:
        driver = AsyncDriver(f"http://127.0.0.1:{port}", {})
        one.run_until_complete(in_background())
        for _ in range(3):
            for loop in (one, other):
                request = Request("POST", "/", b"{}", 5.0)
                answer = loop.run_until_complete(driver.run(asked("it", request, within_s=5.0)))
                assert answer.status == 200
        assert len(callers) == 2
        one.run_until_complete(driver.close(60))
        assert ended == ["later"]
        other.run_until_complete(driver.close(60))
    assert driver._running == {}
