"""A TCP proxy before a server: it can cut or reset its connections, forward nothing or no answer, damage, or vanish."""

import asyncio
import ctypes
import socket
import struct
from asyncio.trsock import TransportSocket
from types import TracebackType
from urllib.parse import urlsplit, urlunsplit

# Of Linux; Python does not name it.
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
# One instruction of the packet filter: keep no byte of any packet.
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)


def receive_nothing(connection: socket.socket | TransportSocket) -> None:
    """Have the kernel drop each packet to a socket before TCP gets it, so that nothing is acknowledged."""
    instructions = ctypes.create_string_buffer(DROP_ALL, len(DROP_ALL))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(instructions)))


class FaultyProxy:
    """A TCP proxy to `port` of 127.0.0.1; `self.port` is its own. `connections` counts accepted connections.

    `held` counts the connections, by direction, of which something waits to be forwarded.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        # The mark of an answer that is held, with all that follows on its connection.
        self._mark: bytes | None = None
        self.holding_answer = asyncio.Event()
        # Bytes of clients, and what is forwarded in their place; nothing ends the connection.
        self._damaged: tuple[bytes, bytes] | None = None
        self._open: set[asyncio.StreamWriter] = set()
        # Those of `_open` that lead to clients, and those that are silent for good.
        self._clients: set[asyncio.StreamWriter] = set()
        self._vanished: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = self.held = 0

    async def __aenter__(self) -> "FaultyProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Close all connections at once, on both sides."""
        for writer in self._open:
            writer.transport.abort()

    def reset(self) -> None:
        """Reset all connections (RST), on both sides."""
        for writer in self._open:
            # Linger 0 s: an abort sends RST rather than FIN.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.cut()

    def damage(self, mark: bytes, replacement: bytes = b"") -> None:
        """Replace these bytes of each client from now on; close its connection instead if `replacement` is empty."""
        self._damaged = mark, replacement

    def lead_to(self, port: int) -> None:
        """Forward connections that come from now on to another server."""
        self._to = port

    def hold(self) -> None:
        """Forward nothing, and keep all connections open."""
        self._forwarding.clear()

    def hold_new(self) -> None:
        """Forward nothing on connections that come from now on, until `release`."""
        self._forwarding = asyncio.Event()

    def vanish(self) -> None:
        """Acknowledge no packet of any client and send none, as a machine that has lost its power. On Linux only."""
        self._vanished |= self._clients
        for writer in self._clients:
            receive_nothing(writer.get_extra_info("socket"))
        receive_nothing(self._server.sockets[0])
        for writer in self._open - self._clients:
            writer.transport.abort()

    def come_back(self) -> None:
        """Take new connections again, as a machine that has restarted and knows none of the former ones."""
        self._server.sockets[0].setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self._forwarding = asyncio.Event()
        self._forwarding.set()

    def hold_answer(self, mark: bytes) -> None:
        """Hold the next answer of the server that has these bytes; `holding_answer` is set then. Only `cut` ends it."""
        self._mark = mark

    def release(self) -> None:
        """Forward again, also what was held."""
        self._forwarding.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._clients.add(writer)
        self._open |= {writer, server_writer}
        for source, target in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._forward(source, target, self._forwarding, answers=target is writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, forwarding: asyncio.Event, *, answers: bool
    ) -> None:
        try:
            while piece := await source.read(65536):
                if answers and self._mark is not None and self._mark in piece:
                    self._mark = None
                    self.holding_answer.set()
                    while await source.read(65536):
                        pass
                    return
                if not answers and self._damaged is not None and self._damaged[0] in piece:
                    if not self._damaged[1]:
                        return
                    piece = piece.replace(*self._damaged)
                self.held += 1
                await forwarding.wait()
                self.held -= 1
                target.write(piece)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            # Whose machine has vanished sends no last packet.
            if target not in self._vanished:
                self._open.discard(target)
                self._clients.discard(target)
                target.close()


def through(proxy: FaultyProxy, dsn: str) -> str:
    """Return a database's URL with the proxy's address."""
    parts = urlsplit(dsn)
    login, _, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{proxy.port}"))
