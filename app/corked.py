"""uvicorn's HTTP protocol with one write for a response instead of two.

uvicorn writes a response's head and body apart: two system calls, and the caller is woken twice. Between them nothing
happens that a caller could see, so this transport keeps the head back until the body comes, in the same turn of the
event loop.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class CorkedTransport:
    """A transport that joins two writes of one turn of the event loop; what is alone goes out when the turn ends."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held: bytes | None = None

    def write(self, data: bytes) -> None:
        """Hold `data` back until this turn's next write or end, or send it together with what is held."""
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held + data)
        else:
            self._held = data
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is held."""
        held, self._held = self._held, None
        if held is not None:
            self._transport.write(held)

    def close(self) -> None:
        """Send what is held, then close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        # Everything else is the transport's own.
        return getattr(self._transport, name)


class CorkedHttp(HttpToolsProtocol):
    """What `halfnote serve` serves with; for plain uvicorn: `--http app.corked:CorkedHttp`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection over a corked transport."""
        super().connection_made(CorkedTransport(transport))  # type: ignore[arg-type]
