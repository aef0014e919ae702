"""TLS for the connections of `halfnote serve`: the limits of `connection_limits.py` hold from the first byte."""

import asyncio
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.server import ServerState

from app.runtime.server_certificate import ServerCertificate
from app.server.connection_limits import HttpLimits
from app.server.http_protocol import DEFAULTS, HttpProtocol, reaper_of


class EarlyReads(asyncio.Protocol):
    """Keeps what arrives between the end of a handshake and the moment when HttpProtocol takes over."""

    def __init__(self) -> None:
        self.received = b""
        self.is_lost = False

    def data_received(self, data: bytes) -> None:
        """Keep decrypted bytes."""
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that nothing is left to serve."""
        self.is_lost = True


class TlsProtocol(asyncio.Protocol):
    """A connection until its handshake is done; then HttpProtocol serves it.

    asyncio's own TLS server tells a protocol of a connection only after the handshake. So a client that never ends its
    handshake would count for no limit. Here a handshake is a connection that has sent no request: it counts, it is the
    first to make room, and it must be done within `request_timeout_s`, together with the first request.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config, self._server_state, self._app_state = config, server_state, app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._limits: HttpLimits = app_state.get("http_limits", DEFAULTS)
        self._connections: set[Any] = server_state.connections
        self.deadline: float | None = None
        self.idle_since: float | None = None
        self.has_sent_request = False
        # What the client sent before the handshake could begin.
        self._encrypted = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection and begin its handshake."""
        self._transport = transport
        self.idle_since = self._loop.time()
        self.deadline = self.idle_since + self._limits.request_timeout_s
        self._connections.add(self)
        if reaper_of(self._server_state, self._loop).admit(self, self._limits.connections_max):
            self._serving = self._loop.create_task(self._serve(self.deadline))
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Keep what arrives until the handshake begins, in the next turn of the event loop."""
        self._encrypted += data

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection that ended before its handshake began."""
        self._connections.discard(self)

    def give_up(self) -> None:
        """Close the connection. A client in a handshake understands no answer."""
        # At once: another connection of this turn must not make room by closing this one again.
        self._connections.discard(self)
        self._transport.abort()

    def shutdown(self) -> None:
        """Close the connection, because the service stops."""
        self._transport.abort()

    async def _serve(self, deadline: float) -> None:
        """Shake hands, then let HttpProtocol serve the connection."""
        if self._transport.is_closing():
            return
        certificate: ServerCertificate = self._app_state["server_certificate"]
        early = EarlyReads()
        # Not in connection_made: uvloop begins to read after it.
        self._transport.pause_reading()
        # `start_tls` sets the protocol at once, and resumes reading in the next turn, after this call.
        self._loop.call_soon(self._pass_on_encrypted)
        try:
            secured = await self._loop.start_tls(
                self._transport,
                early,
                certificate.context,
                server_side=True,
                ssl_handshake_timeout=self._limits.request_timeout_s,
                ssl_shutdown_timeout=self._limits.refusal_read_s,
            )
        except OSError:
            # The client speaks no TLS, does not trust the certificate, left, or took too long.
            return
        finally:
            self._connections.discard(self)
        if secured is None or early.is_lost or self._transport.is_closing():
            # `start_tls` raises nothing if the connection was closed by this side meanwhile.
            return
        http = HttpProtocol(self._config, self._server_state, self._app_state, self._loop)
        secured.set_protocol(http)
        http.connection_made(secured)
        # The time of the handshake counts.
        http.deadline, http.idle_since = deadline, self.idle_since
        if early.received:
            http.data_received(early.received)

    def _pass_on_encrypted(self) -> None:
        """Give the bytes that arrived early to asyncio's protocol of TLS, as the transport would."""
        # uvloop's is a BufferedProtocol by its methods.
        protocol, rest = cast(asyncio.BufferedProtocol, self._transport.get_protocol()), memoryview(self._encrypted)
        while rest:
            buffer = memoryview(protocol.get_buffer(len(rest)))
            count = min(len(rest), len(buffer))
            buffer[:count] = rest[:count]
            protocol.buffer_updated(count)
            rest = rest[count:]
        self._encrypted = b""
