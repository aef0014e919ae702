"""A TCP proxy before a server that can cut its connections, or hold them open and forward nothing."""

import asyncio
from types import TracebackType


class FaultyProxy:
    """A TCP proxy to `port` of 127.0.0.1; `self.port` is its own. `connections` counts accepted connections."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._forwarding = asyncio.Event()
        self._forwarding.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

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

    def hold(self) -> None:
        """Forward nothing, and keep all connections open."""
        self._forwarding.clear()

    def release(self) -> None:
        """Forward again, also what was held."""
        self._forwarding.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, server_writer}
        for source, target in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._forward(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                await self._forwarding.wait()
                target.write(piece)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            self._open.discard(target)
            target.close()
