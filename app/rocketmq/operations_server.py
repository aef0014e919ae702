"""`/livez`, `/readyz` and `/metrics` of a gateway over HTTP, for probes and Prometheus.

They are answered in the loop that serves the clients, so a gateway whose loop hangs fails its probe.
"""

import asyncio

from prometheus_client import CONTENT_TYPE_LATEST

from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.listening import start_server

HEAD_S, HEAD_MAX_BYTES = 5.0, 8192
CONNECTIONS_MAX = 64


class OperationsServer:
    """Answers probes and Prometheus. `ready` is False before the gateway serves, and once it ends."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self.ready = False

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. Raises OSError."""
        self._server = await start_server(self._connected, host, port, limit=HEAD_MAX_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Listen no longer, and end what is under way."""
        if self._server is not None:
            self._server.close()
        for one in list(self._serving):
            one.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (serving := asyncio.current_task()) is not None:
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        try:
            if len(self._serving) <= CONNECTIONS_MAX:
                async with asyncio.timeout(HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, TimeoutError):
            # The caller left, or sends too slowly or too much.
            pass
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"GET is allowed.\n")
        if path == b"/livez":
            return _response("200 OK", b"ok\n")
        if path == b"/readyz":
            return _response("200 OK", b"ready\n") if self.ready else _response("503 Unavailable", b"not ready\n")
        if path == b"/metrics":
            return _response("200 OK", self._metrics.exposition(), CONTENT_TYPE_LATEST)
        return _response("404 Not Found", b"There are /livez, /readyz and /metrics.\n")


def _response(status: str, body: bytes, kind: str = "text/plain; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
