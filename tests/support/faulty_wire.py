"""A wire to a server that tests can cut, or hold so that nothing comes through while nothing is closed."""

import asyncio
from types import TracebackType


class Wire:
    """A TCP relay to `port` of 127.0.0.1; `self.port` is its own. `connections`: how many came."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self.connections = 0

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        self.cut()
        for carrying in self._carrying:
            carrying.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Close all connections at once, on both sides."""
        for writer in self._open:
            writer.transport.abort()

    def hold(self) -> None:
        """Let nothing through."""
        self._flows.clear()

    def release(self) -> None:
        """Let everything through again."""
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        for source, target in ((reader, back), (there, writer)):
            carrying = asyncio.create_task(self._carry(source, target))
            self._carrying.add(carrying)
            carrying.add_done_callback(self._carrying.discard)

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                await self._flows.wait()
                target.write(piece)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            self._open.discard(target)
            target.close()
