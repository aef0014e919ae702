"""Sends bytes to a server as they are, and reads its answers."""

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

# A failure ends by this; nothing waits for it otherwise.
WITHIN_S = 60.0
PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """One response. `headers` have names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


async def read_answer(reader: asyncio.StreamReader, *, has_body: bool = True) -> Answer | None:
    """Return the next final response, or None if the connection closes before one begins."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        rest = error.partial if isinstance(error, asyncio.IncompleteReadError) else b""
        assert rest == b"", rest
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    version, status, *_ = first.split(" ", 2)
    assert version in ("HTTP/1.1", "HTTP/1.0"), first
    if status.startswith("1"):
        return await read_answer(reader, has_body=has_body)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = b""
    if has_body and "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif has_body and headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    return Answer(int(status), headers, body)


async def converse(
    port: int, pieces: Sequence[bytes], count: int, *, open_after: bool | None, tls: ssl.SSLContext | None = None
) -> list[Answer]:
    """Send the pieces; return `count` answers, and the answer to a probe if the connection is to stay open.

    If it is to be closed, return all that is sent until then. Fewer answers are returned if the server closes before.
    """
    async with asyncio.timeout(WITHIN_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        answers: list[Answer] = []
        sending = asyncio.create_task(_send(writer, pieces))
        try:
            for _ in range(count):
                answer = await read_answer(reader)
                if answer is None:
                    return answers
                answers.append(answer)
            await sending
            with contextlib.suppress(ConnectionError):
                if open_after:
                    writer.write(PROBE)
                    answer = await read_answer(reader)
                    return answers if answer is None else [*answers, answer]
                while open_after is False and (answer := await read_answer(reader)) is not None:
                    answers.append(answer)
            return answers
        finally:
            sending.cancel()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, pieces: Sequence[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            # Lets a server in this process read each piece by itself.
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def last_words(reader: asyncio.StreamReader) -> bytes:
    """Return what the server sends until it closes the connection. A reset is a close as well."""
    said = b""
    async with asyncio.timeout(WITHIN_S):
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while more := await reader.read(65_536):
                said += more
    return said


async def trickle(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a piece again and again, as long as the connection is there."""
    with contextlib.suppress(ConnectionError):
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
