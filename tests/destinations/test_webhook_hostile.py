"""Receivers that misbehave: every delivery ends in time, in bounded memory, with an outcome."""

import asyncio
import gzip
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import pytest

from app.delivery import Delivered, Failed, Outcome
from app.egress.http_client import EgressClient
from app.egress.reply import REPLY_LIMIT_BYTES
from tests.support.check_responder import RawServer, Responder, Silent, plain
from tests.support.webhooks import message, now, webhook

T = TypeVar("T")


ENDLESS_BYTES = 64 * 1024 * 1024


async def outcome_at(http_client: EgressClient, url: str, timeout_s: float = 10) -> Outcome:
    async with asyncio.timeout(timeout_s + 20):
        [outcome] = await webhook(http_client, url, timeout_s=timeout_s).deliver([message()], now())
    return outcome


async def flooded(call: Callable[[str], Awaitable[T]], start: bytes, piece: bytes) -> T:
    """Call a server that sends `start` and then `piece` without end; assert that the client closes the connection."""
    client_closed = asyncio.Event()

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        try:
            for _ in range(ENDLESS_BYTES // len(piece)):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            client_closed.set()

    async with RawServer(write) as raw:
        result = await call(raw.url)
        async with asyncio.timeout(20):
            await client_closed.wait()
    return result


async def test_500_with_10_mb_is_read_up_to_16_kib(http_client: EgressClient) -> None:
    async with RawServer(plain(500, b"x" * 10_000_000)) as raw:
        outcome = await outcome_at(http_client, raw.url)
        reply = await http_client.call(raw.url, b"", {}, timeout_s=10)
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.response) == (500, "x" * 1000)
    assert (len(reply.body), reply.truncated) == (REPLY_LIMIT_BYTES, True)


async def test_an_endless_body_is_cut_off_and_the_status_is_the_outcome(http_client: EgressClient) -> None:
    outcome = await flooded(partial(outcome_at, http_client), b"HTTP/1.1 200 OK\r\n\r\n", b"y" * 65_536)
    assert isinstance(outcome, Delivered)


async def test_endless_headers_are_a_failure(http_client: EgressClient) -> None:
    outcome = await flooded(
        partial(outcome_at, http_client), b"HTTP/1.1 200 OK\r\n", b"x-more: and more of it\r\n" * 1000
    )
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.unreachable) == (None, False)


async def test_an_endless_header_is_a_failure(http_client: EgressClient) -> None:
    outcome = await flooded(partial(outcome_at, http_client), b"HTTP/1.1 200 OK\r\nx-long: ", b"z" * 65_536)
    assert isinstance(outcome, Failed)
    assert outcome.status is None


@pytest.mark.parametrize("number", [129, 1000])
async def test_more_headers_than_a_limit_are_a_failure(http_client: EgressClient, number: int) -> None:
    many = {f"x_more_{count}": "and more" for count in range(number)}
    async with RawServer(plain(200, **many)) as raw:
        outcome = await outcome_at(http_client, raw.url)
    assert isinstance(outcome, Failed)
    assert outcome.status is None
    async with RawServer(plain(200, **dict(list(many.items())[:100]))) as raw:
        assert isinstance(await outcome_at(http_client, raw.url), Delivered)


async def test_endless_interim_answers_end_with_the_timeout(http_client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </more>; rel=preload\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0)

    async with RawServer(write) as raw:
        outcome = await outcome_at(http_client, raw.url, timeout_s=0.5)
    assert isinstance(outcome, Failed)
    assert outcome.status is None


async def test_endless_trailers_are_cut_off(http_client: EgressClient) -> None:
    outcome = await flooded(
        partial(outcome_at, http_client, timeout_s=5),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
        b"x-more: and more of it\r\n" * 1000,
    )
    assert isinstance(outcome, Failed)


async def test_a_chunk_of_256_tib_is_cut_off(http_client: EgressClient) -> None:
    reply = await flooded(
        lambda url: http_client.call(url, b"", {}, timeout_s=10),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffff\r\n",
        b"z" * 65_536,
    )
    assert (reply.status, len(reply.body), reply.truncated) == (200, REPLY_LIMIT_BYTES, True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_answer_is_never_decompressed(http_client: EgressClient, encoding: str) -> None:
    zeros = bytes(8 * 1024 * 1024)
    compressed = gzip.compress(zeros) if encoding == "gzip" else zlib.compress(zeros)
    assert len(compressed) < REPLY_LIMIT_BYTES
    async with RawServer(plain(500, compressed, content_encoding=encoding)) as raw:
        reply = await http_client.call(raw.url, b"{}", {}, timeout_s=10)
        outcome = await outcome_at(http_client, raw.url)
    assert (reply.status, reply.body) == (500, compressed)
    assert {request.headers["accept-encoding"] for request in raw.requests} == {"identity"}
    assert isinstance(outcome, Failed)
    assert outcome.response is not None
    assert len(outcome.response) <= 1000


async def test_an_answer_of_single_bytes_ends_with_the_timeout(http_client: EgressClient) -> None:
    async def write_single_bytes(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with RawServer(write_single_bytes) as raw:
        outcome = await outcome_at(http_client, raw.url, timeout_s=0.5)
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.error, outcome.unreachable) == (None, "no whole answer within 0.5 s", False)
    assert outcome.duration_ms >= 500


async def test_a_receiver_that_never_answers_was_reached(http_client: EgressClient) -> None:
    async with Silent() as silent:
        outcome = await outcome_at(http_client, silent.url, timeout_s=0.3)
        assert silent.connections == 1
    assert isinstance(outcome, Failed)
    assert (outcome.error, outcome.unreachable) == ("no whole answer within 0.3 s", False)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"HTTP/1.1 20",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
    ],
)
async def test_a_connection_closed_within_the_answer_is_a_failure(http_client: EgressClient, part: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        writer.close()

    async with RawServer(write) as raw:
        outcome = await outcome_at(http_client, raw.url)
    assert len(raw.requests) == 1
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.unreachable) == (None, False)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n", bytes(100) + b"\r\n\r\n"]
)
async def test_an_answer_that_is_no_http_is_a_failure(http_client: EgressClient, answer: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with RawServer(write) as raw:
        outcome = await outcome_at(http_client, raw.url)
    assert isinstance(outcome, Failed)
    assert outcome.status is None


async def test_a_receiver_that_resets_after_the_request_was_reached(http_client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with RawServer(write) as raw:
        outcome = await outcome_at(http_client, raw.url)
    assert isinstance(outcome, Failed)
    assert not outcome.unreachable


async def test_no_connection_is_unreachable(http_client: EgressClient) -> None:
    async with Responder() as hook:
        closed = hook.url
    for url in (
        closed,
        "http://no-such-host.invalid/hook",
        # A host outside HALFNOTE_ALLOW_NETWORKS.
        "http://192.0.2.1/hook",
    ):
        outcome = await outcome_at(http_client, url)
        assert isinstance(outcome, Failed)
        assert (outcome.status, outcome.unreachable) == (None, True), url
    assert "HALFNOTE_ALLOW_NETWORKS" in outcome.error


async def test_a_failed_tls_handshake_is_unreachable(http_client: EgressClient) -> None:
    async def answer_without_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    async with Silent() as silent:
        # The rest of the timeout allows for a busy machine.
        hanging = await outcome_at(http_client, silent.url.replace("http:", "https:"), timeout_s=3)
    assert isinstance(hanging, Failed)
    assert (hanging.unreachable, hanging.error) == (True, "no connection within 2.7 s")
    async with await asyncio.start_server(answer_without_tls, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        wrong = await outcome_at(http_client, f"https://127.0.0.1:{port}/hook", timeout_s=30)
    assert isinstance(wrong, Failed)
    assert wrong.unreachable
    assert "SSL" in wrong.error


async def test_many_receivers_that_hang_do_not_delay_others(http_client: EgressClient) -> None:
    async with Silent() as silent, Responder() as hook:
        hanging = webhook(http_client, silent.url, timeout_s=60)
        waiting = [asyncio.create_task(hanging.deliver([message(number)], now())) for number in range(300)]
        async with asyncio.timeout(30):
            while silent.connections < len(waiting):
                await asyncio.sleep(0.01)
            outcomes = [await webhook(http_client, hook.url).deliver([message(number)], now()) for number in range(20)]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(outcome, Delivered) for [outcome] in outcomes)


async def test_a_large_body_is_sent_whole(http_client: EgressClient) -> None:
    body = bytes(range(256)) * (4 * 1024 * 4)
    async with Responder() as hook:
        [outcome] = await webhook(http_client, hook.url).deliver([message(body=body, content_type="image/png")], now())
    assert isinstance(outcome, Delivered)
    assert hook.calls[0].body == body
    assert hook.calls[0].headers["content-length"] == str(len(body))
