"""A connection to the gateway's gRPC port on which a test writes frames of HTTP/2 itself."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from app.rocketmq.service import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING = 0, 1, 3, 4, 6
END_STREAM, END_HEADERS, ACKNOWLEDGES = 1, 4, 1
WITHIN_S = 60.0


def frame(kind: int, stream: int, content: bytes = b"", flags: int = 0) -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + content


def texts_of(*texts: str) -> Iterator[bytes]:
    for text in texts:
        yield len(text).to_bytes(1, "big") + text.encode()


def headers(method: str) -> bytes:
    """Return the headers of a call, each as a literal without an index."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        "x-mq-client-id": "slow",
    }
    return b"".join(b"\x00" + b"".join(texts_of(name, value)) for name, value in fields.items())


def message(content: bytes) -> bytes:
    return b"\x00" + len(content).to_bytes(4, "big") + content


class RawCaller:
    """A connection that sends what a test wants, and reads the frames that come."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def begin(self, stream: int, method: str) -> None:
        """Begin a call; its request follows."""
        self._writer.write(frame(HEADERS, stream, headers(method), END_HEADERS))

    def send(self, stream: int, content: bytes, flags: int = 0) -> None:
        """Send bytes of a request."""
        self._writer.write(frame(DATA, stream, content, flags))

    async def greeted(self) -> bool:
        """Take the server's settings, which allow more bytes; return False if it ends the connection instead."""
        async with asyncio.timeout(WITHIN_S):
            try:
                head = await self._reader.readexactly(9)
                await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            except (asyncio.IncompleteReadError, ConnectionResetError):
                return False
        assert head[3] == SETTINGS
        self._writer.write(frame(SETTINGS, 0, flags=ACKNOWLEDGES))
        return True

    def disappear(self) -> None:
        """End the connection without a word of HTTP/2."""
        self._writer.transport.abort()

    async def trickle(self, stream: int) -> None:
        """Send a request of 1,000,000 bytes, one after the other."""
        self.send(stream, b"\x00" + (1_000_000).to_bytes(4, "big"))
        while True:
            self.send(stream, b"x")
            await asyncio.sleep(0.02)

    async def answer(self, stream: int) -> bytes:
        """Return the answer of a call when it has ended."""
        content = b""
        async with asyncio.timeout(WITHIN_S):
            while True:
                head = await self._reader.readexactly(9)
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                body = await self._reader.readexactly(length)
                if kind in (SETTINGS, PING) and not flags & ACKNOWLEDGES:
                    self._writer.write(frame(kind, 0, body if kind == PING else b"", ACKNOWLEDGES))
                if int.from_bytes(head[5:], "big") != stream:
                    continue
                content += body if kind == DATA else b""
                if kind == RESET or (kind in (DATA, HEADERS) and flags & END_STREAM):
                    return content[5:]


@asynccontextmanager
async def raw_caller(port: int) -> AsyncIterator[RawCaller]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS, 0))
    try:
        yield RawCaller(reader, writer)
    finally:
        writer.close()
