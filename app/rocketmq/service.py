"""`apache.rocketmq.v2.MessagingService`: its methods, and how refusals become answers."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

import grpc
import structlog
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtocolMessage

from app.rocketmq.calls import CallContext, ClientCall, client_call
from app.rocketmq.consuming import Consuming
from app.rocketmq.credentials import Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.producing import Producing
from app.rocketmq.protocol import service_pb2 as protocol
from app.rocketmq.protocol.definition_pb2 import Code, Status
from app.rocketmq.refusals import CallRefused
from app.rocketmq.sessions import ClientSessions

log = structlog.get_logger(__name__)

SERVICE = "apache.rocketmq.v2.MessagingService"
_UNEXPECTED = Status(code=Code.INTERNAL_SERVER_ERROR, message="The gateway failed; its log has the error.")

Request = TypeVar("Request", bound=ProtocolMessage)
Answer = TypeVar("Answer", bound=ProtocolMessage)


def _parsed(request_type: type[Request], content: bytes) -> Request:
    # gRPC would log a traceback of each request that it cannot parse, and answer that the server failed.
    try:
        return request_type.FromString(content)
    except DecodeError:
        raise CallRefused(Code.BAD_REQUEST, "The request is no message of the protocol.") from None


class AbortableContext(CallContext, Protocol):
    """A context that can end its call with an error of gRPC's."""

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
    ) -> None:
        self._credentials, self._metrics = credentials, metrics
        self._sessions, self._consuming = sessions, consuming
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
            "ReceiveMessage": grpc.unary_stream_rpc_method_handler(
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

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a server."""
        return grpc.method_handlers_generic_handler(SERVICE, self._methods)

    def _not_implemented(self) -> "dict[str, grpc.RpcMethodHandler[Any, Any]]":
        async def refuse(request: ProtocolMessage, call: ClientCall) -> Any:
            raise CallRefused(Code.NOT_IMPLEMENTED, "Halfnote has no such function.")

        async def refuse_pull(content: bytes, context: AbortableContext) -> AsyncIterator[ProtocolMessage]:
            yield protocol.PullMessageResponse(
                status=Status(code=Code.NOT_IMPLEMENTED, message="Halfnote has no such function.")
            )

        pull: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(
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

        async def answer(content: bytes, context: AbortableContext) -> Answer:
            try:
                call = client_call(context, self._credentials)
                return await method(_parsed(request_type, content), call)
            except CallRefused as refused:
                return refused_with(status=refused.status)
            except Exception:
                log.exception("rocketmq_call_failed", method=method.__name__)
                return refused_with(status=_UNEXPECTED)

        async def handle(content: bytes, context: AbortableContext) -> Answer:
            begun = time.monotonic()
            answered = await answer(content, context)
            self._count(name, cast(Any, answered).status.code, time.monotonic() - begun)
            return answered

        return grpc.unary_unary_rpc_method_handler(handle, None, answer_type.SerializeToString)

    async def _receive(
        self, content: bytes, context: AbortableContext
    ) -> AsyncIterator[protocol.ReceiveMessageResponse]:
        try:
            call = client_call(context, self._credentials)
            request = _parsed(protocol.ReceiveMessageRequest, content)
            async with aclosing(self._consuming.receive(request, call)) as answers:
                async for answer in answers:
                    if answer.HasField("status"):
                        self._count("ReceiveMessage", answer.status.code, None)
                    yield answer
        except CallRefused as refused:
            self._count("ReceiveMessage", refused.code, None)
            yield protocol.ReceiveMessageResponse(status=refused.status)
        except Exception:
            log.exception("rocketmq_call_failed", method="receive")
            self._count("ReceiveMessage", _UNEXPECTED.code, None)
            yield protocol.ReceiveMessageResponse(status=_UNEXPECTED)

    def _count(self, method: str, code: Code, seconds: float | None) -> None:
        self._metrics.answered("grpc", method, Code.Name(code), seconds)

    async def _telemetry(
        self, contents: AsyncIterator[bytes], context: AbortableContext
    ) -> AsyncIterator[protocol.TelemetryCommand]:
        try:
            call = client_call(context, self._credentials)
            commands = (_parsed(protocol.TelemetryCommand, one) async for one in contents)
            async with aclosing(self._sessions.telemetry(commands, call)) as answers:
                async for answer in answers:
                    yield answer
        except CallRefused as refused:
            # A stream has no status in an answer, so RocketMQ's proxy ends it with an error of gRPC's.
            unauthorized = refused.code == Code.UNAUTHORIZED
            code = grpc.StatusCode.UNAUTHENTICATED if unauthorized else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(code, refused.text)
