"""`python -m bench.receiver`: a webhook receiver and check responder with very low cost. It prints its port.

It answers `POST /check` with a commit, any other POST with 204, and `GET /count` with the number of POSTs so far.
"""

import asyncio
import signal
from collections.abc import Callable
from typing import cast

import uvloop

COMMIT = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n" + b'{"verdict":"commit"}'
TAKEN = b"HTTP/1.1 204 No Content\r\n\r\n"
END_OF_HEAD = b"\r\n\r\n"


class Receiver(asyncio.Protocol):
    """Answers the requests of one connection in turn. It parses only as much HTTP as it needs to find their ends."""

    count = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(END_OF_HEAD)) >= 0:
            head = self._buffer[:end]
            whole = end + len(END_OF_HEAD) + length_of(head)
            if len(self._buffer) < whole:
                return
            self._buffer = self._buffer[whole:]
            self._transport.write(self._answer(head))

    def _answer(self, head: bytes) -> bytes:
        if head.startswith(b"GET "):
            body = str(Receiver.count).encode()
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        Receiver.count += 1
        return COMMIT if head.startswith(b"POST /check") else TAKEN


def length_of(head: bytes) -> int:
    """Return a head's Content-Length, 0 if it has none."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def listen(protocol: Callable[[], asyncio.Protocol]) -> None:
    """Serve on a free port, and print it, until SIGTERM or Ctrl-C."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = await loop.create_server(protocol, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stopping.wait()
    server.close()


if __name__ == "__main__":
    uvloop.run(listen(Receiver))
