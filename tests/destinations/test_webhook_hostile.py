"""Receivers that misbehave: whatever they do, a delivery ends in time, in bounded memory, with an outcome."""

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest

from app.delivery import Delivered, Failed, Outcome
from app.egress.http_client import REPLY_LIMIT_BYTES, EgressClient
from tests.support.check_responder import Responder, Silent, Wire, plain
from tests.support.webhooks import egress_client, message, webhook


def now() -> datetime:
    """The time, as a receiver that checks timestamps has it."""
    return datetime.now(UTC)


ENDLESS_BYTES = 64 * 1024 * 1024


@pytest.fixture
async def client() -> AsyncIterator[EgressClient]:
    """A client as the service has it."""
    async with egress_client() as made:
        yield made


async def outcome_at(client: EgressClient, url: str, timeout_s: float = 10) -> Outcome:
    async with asyncio.timeout(timeout_s + 20):
        [outcome] = await webhook(client, url, timeout_s=timeout_s).deliver([message()], now())
    return outcome


async def flood(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Write until the other side hangs up; return how much it let through."""
    sent = 0
    try:
        while sent < ENDLESS_BYTES:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


async def test_500_with_10_mb_is_read_up_to_16_kib(client: EgressClient) -> None:
    async with Wire(plain(500, b"x" * 10_000_000)) as wire:
        outcome = await outcome_at(client, wire.url)
        reply = await client.call(wire.url, b"", {}, timeout_s=10)
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.response) == (500, "x" * 1000)
    assert (len(reply.body), reply.truncated) == (REPLY_LIMIT_BYTES, True)


async def test_an_endless_body_is_cut_off_and_the_status_counts(client: EgressClient) -> None:
    let_through: list[int] = []

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        let_through.append(await flood(writer, b"y" * 65_536))
        hung_up.set()

    hung_up = asyncio.Event()
    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url)
        async with asyncio.timeout(20):
            await hung_up.wait()
    assert isinstance(outcome, Delivered)
    assert let_through[0] < ENDLESS_BYTES


async def test_endless_headers_are_a_failure(client: EgressClient) -> None:
    let_through: list[int] = []

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        let_through.append(await flood(writer, b"x-more: and more of it\r\n" * 1000))
        hung_up.set()

    hung_up = asyncio.Event()
    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url)
        async with asyncio.timeout(20):
            await hung_up.wait()
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.unreachable) == (None, False)
    assert let_through[0] < ENDLESS_BYTES


async def test_one_header_without_end_is_a_failure(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nx-long: ")
        await flood(writer, b"z" * 65_536)
        hung_up.set()

    hung_up = asyncio.Event()
    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url)
        async with asyncio.timeout(20):
            await hung_up.wait()
    assert isinstance(outcome, Failed)
    assert outcome.status is None


@pytest.mark.parametrize("number", [129, 1000])
async def test_more_headers_than_a_limit_are_a_failure(client: EgressClient, number: int) -> None:
    many = {f"x_more_{count}": "and more" for count in range(number)}
    async with Wire(plain(200, **many)) as wire:
        outcome = await outcome_at(client, wire.url)
    assert isinstance(outcome, Failed)
    assert outcome.status is None
    async with Wire(plain(200, **dict(list(many.items())[:100]))) as wire:
        assert isinstance(await outcome_at(client, wire.url), Delivered)


async def test_interim_answers_without_end_take_no_more_than_the_time(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: </more>; rel=preload\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0)

    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url, timeout_s=0.5)
    assert isinstance(outcome, Failed)
    assert outcome.status is None


async def test_trailers_without_end_are_cut_off(client: EgressClient) -> None:
    let_through: list[int] = []

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
        let_through.append(await flood(writer, b"x-more: and more of it\r\n" * 1000))
        hung_up.set()

    hung_up = asyncio.Event()
    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url, timeout_s=5)
        async with asyncio.timeout(20):
            await hung_up.wait()
    assert isinstance(outcome, Failed)
    assert let_through[0] < ENDLESS_BYTES


async def test_a_chunk_that_says_it_is_endless_is_cut_off(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffff\r\n")
        await flood(writer, b"z" * 65_536)
        hung_up.set()

    hung_up = asyncio.Event()
    async with Wire(write) as wire:
        reply = await client.call(wire.url, b"", {}, timeout_s=10)
        async with asyncio.timeout(20):
            await hung_up.wait()
    assert (reply.status, len(reply.body), reply.truncated) == (200, REPLY_LIMIT_BYTES, True)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_bomb_is_never_unpacked(client: EgressClient, encoding: str) -> None:
    zeros = bytes(8 * 1024 * 1024)
    packed = gzip.compress(zeros) if encoding == "gzip" else zlib.compress(zeros)
    assert len(packed) < REPLY_LIMIT_BYTES
    async with Wire(plain(500, packed, content_encoding=encoding)) as wire:
        reply = await client.call(wire.url, b"{}", {}, timeout_s=10)
        outcome = await outcome_at(client, wire.url)
    assert (reply.status, reply.body) == (500, packed)
    assert {heard.headers["accept-encoding"] for heard in wire.heard} == {"identity"}
    assert isinstance(outcome, Failed)
    assert outcome.response is not None
    assert len(outcome.response) <= 1000


async def test_a_byte_at_a_time_ends_with_the_total_time(client: EgressClient) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with Wire(drip) as wire:
        outcome = await outcome_at(client, wire.url, timeout_s=0.5)
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.error, outcome.unreachable) == (None, "no whole answer within 0.5 s", False)
    assert outcome.duration_ms >= 500


async def test_a_receiver_that_never_answers_was_reached(client: EgressClient) -> None:
    async with Silent() as silent:
        outcome = await outcome_at(client, silent.url, timeout_s=0.3)
        assert silent.asked == 1
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
async def test_closing_within_the_answer_is_a_failure(client: EgressClient, part: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        writer.close()

    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url)
    assert len(wire.heard) == 1
    assert isinstance(outcome, Failed)
    assert (outcome.status, outcome.unreachable) == (None, False)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n", bytes(100) + b"\r\n\r\n"]
)
async def test_what_is_no_http_is_a_failure(client: EgressClient, answer: bytes) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url)
    assert isinstance(outcome, Failed)
    assert outcome.status is None


async def test_a_reset_after_the_request_was_taken_was_reached(client: EgressClient) -> None:
    async def write(writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with Wire(write) as wire:
        outcome = await outcome_at(client, wire.url)
    assert isinstance(outcome, Failed)
    assert not outcome.unreachable


async def test_no_connection_is_unreachable(client: EgressClient) -> None:
    async with Responder() as hook:
        closed = hook.url
    for url in (
        closed,
        "http://no-such-host.invalid/hook",
        # A host outside HALFNOTE_ALLOW_NETWORKS.
        "http://192.0.2.1/hook",
    ):
        outcome = await outcome_at(client, url)
        assert isinstance(outcome, Failed)
        assert (outcome.status, outcome.unreachable) == (None, True), url
    assert "HALFNOTE_ALLOW_NETWORKS" in outcome.error


async def test_a_handshake_of_tls_that_comes_to_nothing_is_unreachable(client: EgressClient) -> None:
    async def plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        writer.close()

    async with Silent() as silent:
        # What is left of the whole time is what a busy machine may be late by.
        hanging = await outcome_at(client, silent.url.replace("http:", "https:"), timeout_s=3)
    assert isinstance(hanging, Failed)
    assert (hanging.unreachable, hanging.error) == (True, "no connection within 2.7 s")
    async with await asyncio.start_server(plainly, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        wrong = await outcome_at(client, f"https://127.0.0.1:{port}/hook", timeout_s=30)
    assert isinstance(wrong, Failed)
    assert wrong.unreachable
    assert "SSL" in wrong.error


async def test_many_that_hang_leave_room_for_others(client: EgressClient) -> None:
    async with Silent() as silent, Responder() as hook:
        hanging = webhook(client, silent.url, timeout_s=60)
        stuck = [asyncio.create_task(hanging.deliver([message(number)], now())) for number in range(300)]
        async with asyncio.timeout(30):
            while silent.asked < len(stuck):
                await asyncio.sleep(0.01)
            outcomes = [await webhook(client, hook.url).deliver([message(number)], now()) for number in range(20)]
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(outcome, Delivered) for [outcome] in outcomes)


async def test_a_large_body_goes_whole(client: EgressClient) -> None:
    body = bytes(range(256)) * (4 * 1024 * 4)
    async with Responder() as hook:
        [outcome] = await webhook(client, hook.url).deliver([message(body=body, content_type="image/png")], now())
    assert isinstance(outcome, Delivered)
    assert hook.calls[0].body == body
    assert hook.calls[0].headers["content-length"] == str(len(body))
