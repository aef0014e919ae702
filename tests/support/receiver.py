"""A receiver for many messages: it records them in order of arrival and answers at once."""

import array
import asyncio
import fcntl
import termios
from collections import Counter
from types import TracebackType


class Sink:
    """An HTTP server on a raw socket that answers 204 to every POST.

    `received` has (key, offset) pairs in order of arrival.
    It reads only what the relay writes: one request after another on a connection, with a content-length.
    """

    def __init__(self) -> None:
        self.received: list[tuple[str, int]] = []
        # The clients' ports of connections that were read to their end.
        self.ended: set[int] = set()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def counts(self) -> Counter[int]:
        """How often each offset was received."""
        return Counter(offset for _, offset in self.received)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def has_read_all(self) -> bool:
        """Return whether no connection has bytes that were not read."""
        unread = array.array("i", [0])
        for writer in self._open:
            if writer.is_closing():
                continue
            fcntl.ioctl(writer.get_extra_info("socket").fileno(), termios.FIONREAD, unread)
            if unread[0]:
                return False
        return True

    async def __aenter__(self) -> "Sink":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.port}/in"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        client_port = writer.get_extra_info("peername")[1]
        self.ended.discard(client_port)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                await reader.readexactly(int(fields["content-length"]))
                self.received.append((fields.get("ce-subject", ""), int(fields["halfnote-offset"])))
                writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            self.ended.add(client_port)
            writer.close()
