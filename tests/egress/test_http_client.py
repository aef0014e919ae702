"""The HTTP client's connections: reuse, failures of reused connections, framing, the proxy's tunnel."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from app.delivery import Failed
from app.egress import http_client
from app.egress.http_client import KEEPALIVE_S, EgressClient, callback_client
from app.egress.network_policy import NetworkPolicy
from tests.support.check_responder import Call, RawServer, Responder, plain
from tests.support.deliveries import certificate
from tests.support.webhooks import egress_client, message, networks_of, now, webhook

OK = b"HTTP/1.1 204 No Content\r\n\r\n"


@pytest.fixture
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EgressClient]:
    # A busy machine may notice a close late.
    monkeypatch.setattr(http_client, "AGAIN_WITHIN_S", 30.0)
    async with egress_client() as made:
        yield made


def answers(*parts: bytes | None) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    """Return a `write` function that answers the first request by the first part …, and closes instead of None."""
    left = list(parts)

    async def write(writer: asyncio.StreamWriter) -> None:
        part = left.pop(0)
        if part is None:
            writer.transport.abort()
        else:
            writer.write(part)
            await writer.drain()

    return write


async def statuses(client: EgressClient, server: RawServer, number: int) -> list[int | None]:
    return [(await client.call(server.url, b"{}", {}, timeout_s=30)).status for _ in range(number)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_requests_in_turn_share_a_connection(client: EgressClient) -> None:
    async with RawServer(plain(500, b"no")) as server:
        assert await statuses(client, server, 5) == [500] * 5
        assert server.connections == 1


async def test_a_request_that_meets_the_close_of_an_idle_connection_is_sent_again(client: EgressClient) -> None:
    async with RawServer(answers(OK, None, OK)) as server:
        assert await statuses(client, server, 2) == [204, 204]
        assert (len(server.requests), server.connections) == (3, 2)


async def test_a_request_is_sent_again_once_only(client: EgressClient) -> None:
    async with RawServer(answers(OK, None, None)) as server:
        assert await statuses(client, server, 2) == [204, None]
        assert (len(server.requests), server.connections) == (3, 2)


async def test_a_request_that_the_receiver_had_for_longer_is_not_sent_again(
    client: EgressClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the cause of the loss, so it is an attempt, and the next one comes on schedule."""
    monkeypatch.setattr(http_client, "AGAIN_WITHIN_S", 0.05)

    async def write(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(OK)
        else:
            await asyncio.sleep(0.1)
            writer.transport.abort()

    async with RawServer(write) as server:
        assert await statuses(client, server, 2) == [204, None]
        assert (len(server.requests), server.connections) == (2, 1)


async def test_a_receiver_that_is_lost_with_a_request_was_not_unreachable(client: EgressClient) -> None:
    """Unreachable says that nothing was sent, so that the message cannot be the cause. Here it may be."""

    async def write(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(OK)
        else:
            server.stop_listening()
            writer.transport.abort()

    async with RawServer(write) as server:
        assert await statuses(client, server, 1) == [204]
        lost = await client.call(server.url, b"{}", {}, timeout_s=30)
        refused = await client.call(server.url, b"{}", {}, timeout_s=30)
    assert (lost.status, lost.unreachable, refused.unreachable) == (None, False, True)
    assert (lost.error or "").startswith("the receiver closed the connection before it answered")
    assert "; then no connection to 127.0.0.1" in (lost.error or "")


async def test_the_end_of_the_client_ends_its_calls() -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        """Answer nothing."""

    async with RawServer(write) as server, asyncio.timeout(30):
        async with egress_client() as client:
            call = asyncio.create_task(client.call(server.url, b"{}", {}, timeout_s=3600))
            await until(lambda: len(server.requests) == 1)
        reply = await call
    assert (reply.status, reply.unreachable, reply.timed_out) == (None, False, False)
    assert "the client was closed" in (reply.error or "")


async def test_a_request_with_a_part_of_an_answer_is_not_sent_again(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 1:
            writer.write(OK)
        else:
            writer.write(b"HTTP/1.1 2")
            await writer.drain()
            writer.close()

    async with RawServer(write) as server:
        assert await statuses(client, server, 2) == [204, None]
        assert (len(server.requests), server.connections) == (2, 1)


@pytest.mark.parametrize("extra", [b"HTTP/1.1 500 Forged\r\ncontent-length: 0\r\n\r\n", b"garbage", b"\x00"])
async def test_data_after_an_answer_is_no_answer_to_the_next_request(client: EgressClient, extra: bytes) -> None:
    async with RawServer(answers(OK + extra, OK)) as server:
        assert await statuses(client, server, 2) == [204, 204]
        assert server.connections == 2


async def test_data_on_an_idle_connection_closes_it(client: EgressClient) -> None:
    idle: list[asyncio.StreamWriter] = []

    async def write(writer: asyncio.StreamWriter) -> None:
        idle.append(writer)
        writer.write(OK)

    async with RawServer(write) as server:
        assert await statuses(client, server, 1) == [204]
        idle[0].write(b"HTTP/1.1 500 Forged\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: server.ended == 1)
        assert await statuses(client, server, 1) == [204]
        assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
        b"HTTP/1.0 204 No Content\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    ],
)
async def test_a_connection_that_does_not_go_on_in_http_is_not_used_again(client: EgressClient, answer: bytes) -> None:
    async with RawServer(answers(answer, answer)) as server:
        [first, second] = await statuses(client, server, 2)
        assert first == second == int(answer.split()[1])
        assert server.connections == 2
        await until(lambda: server.ended == 2)


async def test_a_body_without_a_length_ends_with_the_connection(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 No\r\n\r\nthe ")
        await writer.drain()
        writer.write(b"reason")
        writer.close()

    async with RawServer(write) as server:
        reply = await client.call(server.url, b"{}", {}, timeout_s=30)
    assert (reply.status, reply.body, reply.truncated) == (500, b"the reason", False)


async def test_interim_answers_are_skipped_with_their_headers(client: EgressClient) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nretry-after: 9\r\n\r\n"
    final = b"HTTP/1.1 503 No\r\ncontent-length: 2\r\nx: y\r\n\r\nno"
    async with RawServer(answers(interim + final, final)) as server:
        replies = [await client.call(server.url, b"{}", {}, timeout_s=30) for _ in range(2)]
        assert server.connections == 1
    for reply in replies:
        assert (reply.status, reply.body, reply.headers) == (503, b"no", {"content-length": "2", "x": "y"})


async def test_trailers_are_not_headers(client: EgressClient) -> None:
    answer = (
        b"HTTP/1.1 500 No\r\ntransfer-encoding: chunked\r\n\r\n"
        b"2\r\nno\r\n0\r\nwebhook-delivery: abort-message\r\nretry-after: 9\r\n\r\n"
    )
    async with RawServer(answers(answer)) as server:
        [outcome] = await webhook(client, server.url).deliver([message()], now())
    assert isinstance(outcome, Failed)
    assert (outcome.response, outcome.retry_after_s) == ("no", None)


async def test_a_canceled_call_closes_its_connection(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        if len(server.requests) > 1:
            writer.write(OK)

    async with RawServer(write) as server:
        task = asyncio.create_task(client.call(server.url, b"{}", {}, timeout_s=30))
        await until(lambda: len(server.requests) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.ended == 1)
        assert await statuses(client, server, 1) == [204]
        assert server.connections == 2


async def test_callers_at_once_get_their_own_answers(client: EgressClient) -> None:
    """Some time out and some are canceled; their late answers must not reach others."""
    chance = random.Random(1030)

    async def answer(call: Call) -> web.StreamResponse:
        await asyncio.sleep(chance.random() * 0.02)
        return web.Response(body=call.body, status=chance.choice([200, 500]))

    async def calls(caller: int) -> int:
        answered = 0
        for number in range(15):
            body = b"%d of %d" % (number, caller)
            patience_s = chance.choice([0.01, 30])
            try:
                async with asyncio.timeout(chance.choice([0.005, 60])):
                    reply = await client.call(responder.url, body, {}, timeout_s=patience_s)
            except TimeoutError:
                continue
            if reply.status is None:
                assert reply.timed_out
            else:
                assert reply.body == body
                answered += 1
        return answered

    async with Responder(answer) as responder:
        assert sum(await asyncio.gather(*map(calls, range(30)))) > 30


async def test_an_answer_before_the_end_of_a_large_body_is_taken(client: EgressClient) -> None:
    writers: list[asyncio.StreamWriter] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer after the head, and never read the rest of the body."""
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")

    async with await asyncio.start_server(refuse, "127.0.0.1", 0, limit=4096) as server:
        port = server.sockets[0].getsockname()[1]
        reply = await client.call(f"http://127.0.0.1:{port}/", bytes(64 * 1024 * 1024), {}, timeout_s=60)
        await abort(writers)
    assert reply.status == 413


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\x00b"])
async def test_a_header_with_a_line_break_is_not_sent(client: EgressClient, value: str) -> None:
    async with RawServer(plain(204)) as server:
        reply = await client.call(server.url, b"{}", {"x-token": value}, timeout_s=30)
        assert server.connections == 0
    assert (reply.status, reply.unreachable) == (None, False)
    assert "line break" in (reply.error or "")


@pytest.mark.slow
async def test_an_idle_connection_is_closed(client: EgressClient) -> None:
    async with RawServer(plain(204)) as server:
        await asyncio.gather(*(client.call(server.url, b"{}", {}, timeout_s=30) for _ in range(3)))
        opened = server.connections
        await until(lambda: server.ended == opened)
        assert KEEPALIVE_S < 5


async def test_callers_at_once_share_a_lookup_and_the_next_address_is_tried() -> None:
    looked_up: list[str] = []

    async def lookup(host: str) -> list[str]:
        looked_up.append(host)
        await asyncio.sleep(0)
        # Nothing listens at the first address.
        return ["127.0.0.3", "127.0.0.1"]

    async with RawServer(plain(204)) as server:
        port = urlsplit(server.url).port
        async with callback_client(NetworkPolicy(opened=networks_of("127.0.0.0/8"), lookup=lookup)) as client:
            url = f"http://shop.test:{port}/"
            replies = await asyncio.gather(*(client.call(url, b"", {}, timeout_s=30) for _ in range(10)))
    assert [reply.status for reply in replies] == [204] * 10
    assert looked_up == ["shop.test"]


async def test_a_name_without_an_address_is_unreachable() -> None:
    async def lookup(host: str) -> list[str]:
        raise OSError("the name server is away")

    async with callback_client(NetworkPolicy(opened=networks_of("127.0.0.0/8"), lookup=lookup)) as client:
        failed = await client.call("http://shop.test/", b"", {}, timeout_s=30)
    assert (failed.unreachable, failed.error) == (True, "no address of shop.test: the name server is away")


async def abort(writers: Sequence[asyncio.StreamWriter]) -> None:
    """Close connections, and wait until the loop has closed their sockets."""
    for writer in writers:
        writer.transport.abort()
    for writer in writers:
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def tunnel(first: bytes = b"HTTP/1.1 200 Connected\r\n\r\n") -> AsyncIterator[tuple[str, list[str]]]:
    """Run a proxy that answers CONNECT with `first` and passes bytes on; yield its URL and the requested hosts."""
    requested: list[str] = []
    passing: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requested.append(head.split()[1])
        host, _, port = requested[-1].rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        writers.extend((writer, back))
        writer.write(first)
        for task in (asyncio.create_task(pass_on(reader, back)), asyncio.create_task(pass_on(there, writer))):
            passing.add(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://us:word@127.0.0.1:{server.sockets[0].getsockname()[1]}", requested
    finally:
        server.close()
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)
        await abort(writers)
        await server.wait_closed()


@asynccontextmanager
async def tls_server(directory: Path) -> AsyncIterator[tuple[str, Path, list[bytes]]]:
    """Serve TLS for `localhost`; yield the URL, the certificate, and the request lines."""
    certificate_file, key_file = certificate(directory, "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    lines: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines.append(head.split(b"\r\n")[0])
                await reader.readexactly(2)
                writer.write(OK)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}/in?token=hidden", certificate_file, lines
    finally:
        server.close()
        await abort(writers)
        await server.wait_closed()


async def test_tls_through_a_proxy_is_verified_and_shares_the_tunnel(tmp_path: Path) -> None:
    async with tls_server(tmp_path) as (url, ca, lines), tunnel() as (proxy, requested):
        async with egress_client("", proxy_url=proxy, tls_ca_file=ca) as client:
            replies = [await client.call(url, b"{}", {}, timeout_s=30) for _ in range(3)]
        async with egress_client("", proxy_url=proxy) as client:
            distrusted = await client.call(url, b"{}", {}, timeout_s=30)
    assert [reply.status for reply in replies] == [204] * 3
    assert lines == [b"POST /in?token=hidden HTTP/1.1"] * 3
    assert requested == [f"localhost:{urlsplit(url).port}"] * 2
    assert distrusted.unreachable
    assert "certificate verify failed" in (distrusted.error or "")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_gets_no_host_that_it_could_decode_to_an_address(scheme: str) -> None:
    async with tunnel() as (proxy, requested), egress_client("", proxy_url=proxy) as client:
        reply = await client.call(f"{scheme}://127%2e0%2e0%2e1:1/", b"{}", {}, timeout_s=30)
    assert (reply.unreachable, reply.error) == (True, "the URL must not percent-encode its host")
    assert requested == []


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "HALFNOTE_PROXY_URL answered 407"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "HALFNOTE_PROXY_URL did not answer with HTTP/1.1"),
        (b"HTTP/1.1 200 Connected\r\n\r\nmore", "HALFNOTE_PROXY_URL sent data before TLS began"),
        (b"HTTP/1.1 200 Connected\r\nx: " + b"x" * 10_000, "HALFNOTE_PROXY_URL answered with more than 8192 bytes of"),
    ],
)
async def test_a_proxy_that_opens_no_tunnel(tmp_path: Path, first: bytes, error: str) -> None:
    async with tls_server(tmp_path) as (url, ca, lines), tunnel(first) as (proxy, _):
        async with egress_client("", proxy_url=proxy, tls_ca_file=ca) as client:
            reply = await client.call(url, b"{}", {}, timeout_s=30)
        assert lines == []
    assert (reply.status, reply.unreachable) == (None, True)
    assert error in (reply.error or "")
