"""A slow broker: a proxy to Halfnote that forwards requests and can delay answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from examples.order_1030.programs import HOST

CHUNK = 65_536


class SlowWay:
    """`url` forwards to `target` (a port of this host). While `flowing` is not set, the proxy returns no answer."""

    def __init__(self, target: int) -> None:
        self._target = target
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.url = ""

    @asynccontextmanager
    async def open(self) -> AsyncIterator["SlowWay"]:
        """Listen for the time of the block."""
        server = await asyncio.start_server(self._carry, HOST, 0)
        self.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(HOST, self._target)
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer, held=True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, held: bool = False) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(CHUNK):
                if held:
                    await self.flowing.wait()
                writer.write(chunk)
                await writer.drain()
        with suppress(ConnectionError):
            writer.close()
