"""A transport that joins the writes of a response's head and body.

uvicorn writes a response's head and body apart: that takes two system calls and wakes the caller twice. This transport
holds the head until the body follows, in the same turn of the event loop.
"""

import asyncio
from typing import Any


class CoalescingTransport:
    """A transport that joins two writes of one turn of the event loop. A single write leaves when the turn ends."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | None = None
        # Asked for each answer, so not by way of `__getattr__`.
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Hold `data` until this turn's next write or end. If data is held already, send both together."""
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held + data)
        else:
            self._held = data
            self._loop.call_soon(self.flush)

    def write_whole(self, data: bytes) -> None:
        """Send the held data and `data`, to which nothing follows in this turn."""
        held, self._held = self._held, None
        self._transport.write(data if held is None else held + data)

    def flush(self) -> None:
        """Send the held data."""
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held)

    def write_eof(self) -> None:
        """Send the held data, then the end of this direction."""
        self.flush()
        self._transport.write_eof()

    def close(self) -> None:
        """Send the held data, then close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        # All other members are those of the wrapped transport.
        return getattr(self._transport, name)
