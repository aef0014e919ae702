"""`apache.rocketmq.v2.MessagingService`: its methods, and how refusals become answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar, cast

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtocolMessage

from app.rocketmq.buffers import Buffers
from app.rocketmq.calls import CallContext, ClientCall, client_call
from app.rocketmq.connection_limit import ConnectionLimit
from app.rocketmq.consuming import Consuming
from app.rocketmq.credentials import Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.producing import Producing
from app.rocketmq.protocol import service_pb2 as protocol
from app.rocketmq.protocol.definition_pb2 import Code, Status
from app.rocketmq.refusals import CallRefused
from app.rocketmq.request_limits import RequestLimits
from app.rocketmq.sessions import ClientSessions
from app.rocketmq.settings_stream import SettingsStream

log = structlog.get_logger(__name__)

SERVICE = "apache.rocketmq.v2.MessagingService"
_UNEXPECTED = Status(code=Code.INTERNAL_SERVER_ERROR, message="The gateway failed; its log has the error.")
# A stream has no status in an answer. RocketMQ's proxy ends it with an error of gRPC's.
_ENDED_WITH = {
    Code.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    Code.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.INTERNAL_SERVER_ERROR: grpc.StatusCode.UNAVAILABLE,
}


Request = TypeVar("Request", bound=ProtocolMessage)
Answer = TypeVar("Answer", bound=ProtocolMessage)


def _stops() -> CallRefused:
    return CallRefused(Code.INTERNAL_SERVER_ERROR, "The gateway stops. Try again.")


def _parsed(request_type: type[Request], content: bytes) -> Request:
    # gRPC would log a traceback of each request that it cannot parse, and answer that the server failed.
    try:
        return request_type.FromString(content)
    except DecodeError:
        raise CallRefused(Code.BAD_REQUEST, "The request is no message of the protocol.") from None


class RequestContext(CallContext, Protocol):
    """A context from which requests are read, and which can end its call with an error of gRPC's."""

    async def read(self) -> object:
        """Return the next request, or gRPC's EOF."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the call."""


class MessagingService:
    """The methods of RocketMQ's service, each with the check of who calls."""

    def __init__(
        self,
        credentials: Credentials,
        metrics: GatewayMetrics,
        sessions: ClientSessions,
        producing: Producing,
        consuming: Consuming,
        limits: RequestLimits,
        buffers: Buffers,
    ) -> None:
        self._credentials, self._metrics, self._limits, self._buffers = credentials, metrics, limits, buffers
        self._sessions, self._consuming = sessions, consuming
        self.connections = ConnectionLimit(limits.connections)
        # The tasks that wait for a request.
        self._arriving: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._stopping = self._given_up = False
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "QueryRoute": self._unary(sessions.route, protocol.QueryRouteRequest, protocol.QueryRouteResponse),
            "QueryAssignment": self._unary(
                sessions.assignment, protocol.QueryAssignmentRequest, protocol.QueryAssignmentResponse
            ),
            "Heartbeat": self._unary(sessions.heartbeat, protocol.HeartbeatRequest, protocol.HeartbeatResponse),
            "NotifyClientTermination": self._unary(
                sessions.leave, protocol.NotifyClientTerminationRequest, protocol.NotifyClientTerminationResponse
            ),
            "Telemetry": grpc.stream_stream_rpc_method_handler(
                self._telemetry, None, protocol.TelemetryCommand.SerializeToString
            ),
            "SendMessage": self._unary(producing.send, protocol.SendMessageRequest, protocol.SendMessageResponse),
            "EndTransaction": self._unary(
                producing.end, protocol.EndTransactionRequest, protocol.EndTransactionResponse
            ),
            "ReceiveMessage": grpc.stream_stream_rpc_method_handler(
                self._receive, None, protocol.ReceiveMessageResponse.SerializeToString
            ),
            "AckMessage": self._unary(consuming.acknowledge, protocol.AckMessageRequest, protocol.AckMessageResponse),
            "ChangeInvisibleDuration": self._unary(
                consuming.change_invisible,
                protocol.ChangeInvisibleDurationRequest,
                protocol.ChangeInvisibleDurationResponse,
            ),
            "ForwardMessageToDeadLetterQueue": self._unary(
                consuming.forward_to_dead_letters,
                protocol.ForwardMessageToDeadLetterQueueRequest,
                protocol.ForwardMessageToDeadLetterQueueResponse,
            ),
            **self._not_implemented(),
        }

    def stop(self) -> None:
        """Refuse the calls whose requests have not arrived.

        gRPC would cancel them at the end of its drain, each with a traceback.
        """
        self._stopping = True
        for task in self._arriving:
            task.cancel()

    def give_up(self) -> None:
        """Refuse the calls that still run at the end of the drain, for the same reason."""
        self._given_up = True
        for task in self._running:
            task.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether no call runs of those that gRPC has handed over."""
        return not self._running

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a server."""
        return grpc.method_handlers_generic_handler(SERVICE, self._methods)

    def _not_implemented(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        async def refuse(request: ProtocolMessage, call: ClientCall) -> Any:
            raise CallRefused(Code.NOT_IMPLEMENTED, "Halfnote has no such function.")

        async def refuse_pull(contents: object, context: RequestContext) -> AsyncIterator[ProtocolMessage]:
            yield protocol.PullMessageResponse(
                status=Status(code=Code.NOT_IMPLEMENTED, message="Halfnote has no such function.")
            )

        pull: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            refuse_pull, None, protocol.PullMessageResponse.SerializeToString
        )
        unary = {
            name: self._unary(refuse, getattr(protocol, f"{name}Request"), getattr(protocol, f"{name}Response"))
            for name in (
                "UpdateOffset",
                "GetOffset",
                "QueryOffset",
                "RecallMessage",
                "SyncLiteSubscription",
            )
        }
        return {"PullMessage": pull, **unary}

    def _unary(
        self,
        method: Callable[[Request, ClientCall], Awaitable[Answer]],
        request_type: type[Request],
        answer_type: type[Answer],
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        refused_with: Callable[..., Answer] = answer_type
        name = request_type.DESCRIPTOR.name.removesuffix("Request")

        async def handle(contents: object, context: RequestContext) -> Answer:
            begun = None
            try:
                with self._admitted(context) as call:
                    content = await self._arrived(context)
                    begun = time.monotonic()
                    async with self._held(len(content)):
                        answered = await method(_parsed(request_type, content), call)
            except CallRefused as refused:
                answered = refused_with(status=refused.status)
            except asyncio.CancelledError:
                if not self._given_up:
                    raise
                answered = refused_with(status=_stops().status)
            except Exception:
                log.exception("rocketmq_call_failed", method=method.__name__)
                answered = refused_with(status=_UNEXPECTED)
            seconds = None if begun is None else time.monotonic() - begun
            self._count(name, cast(Any, answered).status.code, seconds)
            return answered

        # A stream of one request: gRPC calls a handler of a single request only after it has arrived, however long that
        # takes.
        return grpc.stream_unary_rpc_method_handler(handle, None, answer_type.SerializeToString)

    @contextmanager
    def _admitted(self, context: RequestContext) -> Iterator[ClientCall]:
        """Yield who calls, and count the connection meanwhile. Raises CallRefused."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            with self.connections.call(context.peer()):
                yield client_call(context, self._credentials)
        finally:
            self._running.discard(task)

    @asynccontextmanager
    async def _held(self, size: int) -> AsyncIterator[None]:
        """Count a request that has arrived while it is answered. Raises CallRefused if there is no room for it soon."""
        buffered = self._buffers.part()
        if not await buffered.arrived_request(size):
            raise CallRefused(
                Code.TOO_MANY_REQUESTS,
                "This gateway holds as many bytes of requests as it may (--max-buffered-bytes). Try again.",
            )
        try:
            yield
        finally:
            buffered.release()

    async def _arrived(self, context: RequestContext) -> bytes:
        """Return the next request of a call. Raises CallRefused if it does not arrive in time."""
        if self._stopping:
            raise _stops()
        reading = _begin_read(context)
        within_s, task = self._limits.arrives_s, asyncio.current_task()
        assert task is not None
        self._arriving.add(task)
        try:
            await asyncio.wait((reading,), timeout=within_s)
        except asyncio.CancelledError:
            if self._stopping:
                raise _stops() from None
            raise
        finally:
            self._arriving.discard(task)
        if not reading.done():
            raise CallRefused(
                Code.REQUEST_TIMEOUT, f"The request did not arrive within {within_s:g} s (--request-timeout-s)."
            )
        try:
            content = reading.result()
        except grpc.aio.BaseError as error:
            # The server has stopped meanwhile. Its other errors are ours.
            if isinstance(error, grpc.aio.UsageError | grpc.aio.InternalError):
                raise
            raise _stops() from error
        if not isinstance(content, bytes):
            raise CallRefused(Code.BAD_REQUEST, "The call has no request.")
        return content

    async def _receive(
        self, contents: object, context: RequestContext
    ) -> AsyncIterator[protocol.ReceiveMessageResponse]:
        try:
            with self._admitted(context) as call:
                request = _parsed(protocol.ReceiveMessageRequest, await self._arrived(context))
                async with aclosing(self._consuming.receive(request, call)) as answers:
                    async for answer in answers:
                        if answer.HasField("status"):
                            self._count("ReceiveMessage", answer.status.code, None)
                        yield answer
        except CallRefused as refused:
            self._count("ReceiveMessage", refused.code, None)
            yield protocol.ReceiveMessageResponse(status=refused.status)
        except asyncio.CancelledError:
            if not self._given_up:
                raise
            yield protocol.ReceiveMessageResponse(status=_stops().status)
        except Exception:
            log.exception("rocketmq_call_failed", method="receive")
            self._count("ReceiveMessage", _UNEXPECTED.code, None)
            yield protocol.ReceiveMessageResponse(status=_UNEXPECTED)

    def _count(self, method: str, code: Code, seconds: float | None) -> None:
        self._metrics.answered("grpc", method, Code.Name(code), seconds)

    async def _commands(self, context: RequestContext) -> AsyncIterator[protocol.TelemetryCommand]:
        # Clients begin with their settings. What follows may come at any time.
        stream = SettingsStream(self._limits)
        content: object = await self._arrived(context)
        while isinstance(content, bytes):
            yield _command(stream, content)
            reading = _begin_read(context)
            await asyncio.wait((reading,))
            content = reading.result()

    async def _telemetry(self, contents: object, context: RequestContext) -> AsyncIterator[protocol.TelemetryCommand]:
        try:
            with self._admitted(context) as call:
                commands = self._commands(context)
                async with aclosing(self._sessions.telemetry(commands, call)) as answers:
                    async for answer in answers:
                        yield answer
        except CallRefused as refused:
            self._count("Telemetry", refused.code, None)
            await context.abort(_ENDED_WITH.get(refused.code, grpc.StatusCode.INVALID_ARGUMENT), refused.text)


def _begin_read(context: RequestContext) -> "asyncio.Future[object]":
    """Begin to read the next request of a call. A caller that is canceled leaves the read, which ends with its call.

    A read that is canceled would leave gRPC with memory that is freed, to which it writes at the end of the call.
    """
    reading = asyncio.ensure_future(context.read())
    # If no one awaits it, it fails when the server stops.
    reading.add_done_callback(_retrieved)
    return reading


def _retrieved(reading: "asyncio.Future[object]") -> None:
    if not reading.cancelled():
        reading.exception()


def _command(stream: SettingsStream, content: bytes) -> protocol.TelemetryCommand:
    stream.take(content, time.monotonic())
    return _parsed(protocol.TelemetryCommand, content)
