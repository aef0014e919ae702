"""The server of the remoting protocol: which part answers which request."""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from app.rocketmq.buffers import BufferedBytes, Buffers
from app.rocketmq.credentials import Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.listening import start_server
from app.rocketmq.refusals import CallRefused
from app.rocketmq.remoting.codes import RemotingRefused, RequestCode, ResultCode, remoting_refusal
from app.rocketmq.remoting.connections import RemotingConnection
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.membership import Membership
from app.rocketmq.remoting.pulling import Pulling
from app.rocketmq.remoting.remoting_clients import RemotingClients
from app.rocketmq.remoting.remoting_producing import RemotingProducing
from app.rocketmq.remoting.requests import RemotingCall
from app.rocketmq.remoting.routes import Routes
from app.rocketmq.remoting.sending_back import SendingBack
from app.rocketmq.remoting.signatures import keys_of_request
from app.rocketmq.request_limits import RequestLimits

log = structlog.get_logger(__name__)

Handler = Callable[[RemotingCall], Awaitable[RemotingFrame]]


@dataclass(frozen=True, slots=True)
class RemotingParts:
    """The parts that answer requests."""

    routes: Routes
    membership: Membership
    pulling: Pulling
    sending_back: SendingBack
    producing: RemotingProducing


class RemotingServer:
    """Listens, and answers requests."""

    def __init__(
        self,
        credentials: Credentials,
        metrics: GatewayMetrics,
        clients: RemotingClients,
        parts: RemotingParts,
        limits: RequestLimits,
        buffers: Buffers,
    ) -> None:
        self._credentials, self._metrics, self._clients = credentials, metrics, clients
        self._limits, self._buffers = limits, buffers
        self._connections: set[RemotingConnection] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._stopping = False
        self._tls: ssl.SSLContext | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        edge, send = parts.pulling.edge, parts.producing.send
        self._handlers: dict[int, Handler] = {
            RequestCode.GET_ROUTE: parts.routes.route,
            RequestCode.SEND_MESSAGE: send,
            RequestCode.SEND_MESSAGE_V2: send,
            RequestCode.SEND_BATCH_MESSAGE: send,
            RequestCode.END_TRANSACTION: parts.producing.end,
            RequestCode.HEART_BEAT: parts.membership.heartbeat,
            RequestCode.UNREGISTER_CLIENT: parts.membership.leave,
            RequestCode.GET_CONSUMER_LIST_BY_GROUP: parts.membership.consumers,
            RequestCode.LOCK_BATCH_MQ: parts.membership.lock,
            RequestCode.UNLOCK_BATCH_MQ: parts.membership.unlock,
            RequestCode.CHECK_CLIENT_CONFIG: parts.membership.check_configuration,
            RequestCode.PULL_MESSAGE: parts.pulling.pull,
            RequestCode.QUERY_CONSUMER_OFFSET: parts.pulling.committed,
            RequestCode.UPDATE_CONSUMER_OFFSET: parts.pulling.commit,
            RequestCode.GET_MAX_OFFSET: edge,
            RequestCode.GET_MIN_OFFSET: edge,
            RequestCode.SEARCH_OFFSET: edge,
            RequestCode.CONSUMER_SEND_MSG_BACK: parts.sending_back.by_place,
        }

    def __len__(self) -> int:
        return len(self._connections)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen; return the port. Raises OSError."""
        self._tls = tls
        self._server = await start_server(self._connected, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Take no more requests, and end all connections when those that were taken are answered."""
        if self._server is None:
            return
        self._stopping = True
        self._server.close()
        for handshake in self._handshakes:
            handshake.cancel()
        for connection in list(self._connections):
            connection.end()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._stopping:
            # The loop took it before the server was closed.
            writer.transport.abort()
            return
        if len(self._connections) >= self._limits.connections:
            log.warning("rocketmq_too_many_connections", connections=self._limits.connections)
            self._metrics.connection_refused("too_many")
            writer.transport.abort()
            return
        connection = RemotingConnection(reader, writer, self._limits, self._metrics, self._buffers)
        self._connections.add(connection)
        if (serving := asyncio.current_task()) is not None:
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
        try:
            if self._tls is None or await self._has_begun_tls(writer, self._tls):
                await connection.serve(self._answer)
        finally:
            self._connections.discard(connection)
            self._clients.disconnect(connection)

    async def _has_begun_tls(self, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> bool:
        """Begin TLS on a counted connection. asyncio's own server tells of one only after the handshake."""
        handshake = asyncio.current_task()
        assert handshake is not None
        self._handshakes.add(handshake)
        try:
            await writer.start_tls(context, ssl_handshake_timeout=self._limits.arrives_s)
        except ssl.SSLError:
            self._metrics.connection_refused("frame")
        except ConnectionAbortedError:
            # What asyncio raises when the time is over.
            self._metrics.connection_refused("slow")
        except OSError:
            # The client left.
            pass
        else:
            return True
        finally:
            self._handshakes.discard(handshake)
        writer.transport.abort()
        return False

    async def _answer(
        self, frame: RemotingFrame, connection: RemotingConnection, buffered: BufferedBytes
    ) -> RemotingFrame:
        begun = time.monotonic()
        answer = await self._answered(frame, connection, buffered)
        # Codes that clients invent count as one.
        method = RequestCode(frame.code).name if frame.code in self._handlers else "OTHER"
        waits = frame.code == RequestCode.PULL_MESSAGE
        code = ResultCode(answer.code).name
        self._metrics.answered("remoting", method, code, None if waits else time.monotonic() - begun)
        return answer

    async def _answered(
        self, frame: RemotingFrame, connection: RemotingConnection, buffered: BufferedBytes
    ) -> RemotingFrame:
        handler = self._handlers.get(frame.code)
        if handler is None:
            return frame.answered(
                ResultCode.REQUEST_CODE_NOT_SUPPORTED, f"Halfnote does not serve requests of the code {frame.code}."
            )
        try:
            keys = keys_of_request(frame, self._credentials)
            return await handler(RemotingCall(frame, connection, keys, buffered))
        except CallRefused as refused:
            answer = _refused(frame, remoting_refusal(refused))
        except RemotingRefused as refused:
            answer = _refused(frame, refused)
        except Exception:
            log.exception("rocketmq_request_failed", code=frame.code)
            return frame.answered(ResultCode.SYSTEM_ERROR, "The gateway failed; its log has the error.")
        if frame.wants_no_answer:
            # The client does not learn it. A check asks again for an end that was lost.
            log.info("rocketmq_request_refused", code=frame.code, error=answer.remark)
        return answer


def _refused(frame: RemotingFrame, refused: RemotingRefused) -> RemotingFrame:
    return frame.answered(refused.code, refused.text)
