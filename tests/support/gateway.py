"""The gateway for RocketMQ's clients: as a process, and in a test's own loop over the service in process."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import grpc
import grpc.aio
import httpx
from google.protobuf.message import Message as ProtocolMessage

from app.rocketmq.buffers import Buffers
from app.rocketmq.checks import CheckClaims
from app.rocketmq.claiming import Claiming
from app.rocketmq.clients import ConnectedClients
from app.rocketmq.consuming import Consuming
from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.leaving import Leaving
from app.rocketmq.producing import Producing
from app.rocketmq.protocol import definition_pb2 as definition
from app.rocketmq.protocol import service_pb2 as protocol
from app.rocketmq.renewals import Renewals
from app.rocketmq.request_limits import RequestLimits
from app.rocketmq.server import grpc_server
from app.rocketmq.service import SERVICE, MessagingService
from app.rocketmq.sessions import ClientSessions
from app.rocketmq.storing import Storing
from app.rocketmq.subscriptions import Subscriptions
from tests.support.processes import ROOT

Answer = TypeVar("Answer", bound=ProtocolMessage)

BODY_LIMIT = 3_000_000
WITHIN_S = 60.0
LIMITS = RequestLimits(
    body_bytes=BODY_LIMIT,
    arrives_s=WITHIN_S,
    connections=4096,
    topics=1000,
    settings_bytes=1024 * 1024,
    settings_per_minute=60,
    buffered_bytes=64 * 1024 * 1024,
)


class GatewayProcess:
    """`halfnote rocketmq` on a free port."""

    def __init__(self, directory: Path, url: str, *arguments: str, **env: str) -> None:
        self._command = [sys.executable, "-m", "app.cli", "rocketmq", "--url", url, "--port", "0", *arguments]
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")},
            **env,
        }
        self.log = directory / f"gateway-{uuid4().hex[:8]}.log"
        self.port = 0
        self.remoting_port = 0
        self.operations_port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the process and wait until it listens; raises with its log if it ends instead."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        async with asyncio.timeout(WITHIN_S):
            while (found := re.search(r'"port": (\d+)', self.log.read_text())) is None:
                if self.process.poll() is not None:
                    raise RuntimeError(self.log.read_text())
                await asyncio.sleep(0.05)
        self.port = int(found[1])
        if remoting := re.search(r'"remoting_port": (\d+)', self.log.read_text()):
            self.remoting_port = int(remoting[1])
        if operations := re.search(r'"operations_port": (\d+)', self.log.read_text()):
            self.operations_port = int(operations[1])

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=WITHIN_S)


class RocketClient:
    """A client that says exactly what a test wants, by RocketMQ's protocol."""

    def __init__(self, channel: grpc.aio.Channel, **metadata: str) -> None:
        self._channel = channel
        self.client_id = f"test-{uuid4()}"
        self._metadata = {"x-mq-client-id": self.client_id, "x-mq-language": "PYTHON", **metadata}

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The headers of each call."""
        return tuple((name, value) for name, value in self._metadata.items() if value)

    async def call(self, name: str, request: ProtocolMessage, *, timeout_s: float = 30) -> Any:
        """Call a method that has one answer."""
        answer = getattr(protocol, f"{name}Response")
        method = self._channel.unary_unary(f"/{SERVICE}/{name}", type(request).SerializeToString, answer.FromString)
        return await method(request, metadata=self.metadata, timeout=timeout_s)

    def begin_receive(
        self, request: protocol.ReceiveMessageRequest, *, timeout_s: float = 40
    ) -> "grpc.aio.UnaryStreamCall[Any, protocol.ReceiveMessageResponse]":
        """Begin to receive; return the call, whose answers are read from it."""
        method = self._channel.unary_stream(
            f"/{SERVICE}/ReceiveMessage",
            protocol.ReceiveMessageRequest.SerializeToString,
            protocol.ReceiveMessageResponse.FromString,
        )
        return method(request, metadata=self.metadata, timeout=timeout_s)

    async def receive(
        self, request: protocol.ReceiveMessageRequest, *, timeout_s: float = 40
    ) -> tuple[int, list[definition.Message]]:
        """Receive; return the status code and the messages."""
        code, messages = 0, []
        async for answer in self.begin_receive(request, timeout_s=timeout_s):
            if answer.HasField("status"):
                code = answer.status.code
            elif answer.HasField("message"):
                messages.append(answer.message)
        return code, messages

    def telemetry(self) -> Any:
        """Open the stream of settings and commands."""
        method = self._channel.stream_stream(
            f"/{SERVICE}/Telemetry",
            protocol.TelemetryCommand.SerializeToString,
            protocol.TelemetryCommand.FromString,
        )
        return method(metadata=self.metadata)

    async def connect(self, settings: definition.Settings) -> tuple[Any, definition.Settings]:
        """Open the stream and send settings; return the stream and the settings of the answer."""
        stream = self.telemetry()
        await stream.write(protocol.TelemetryCommand(settings=settings))
        answer = await stream.read()
        return stream, answer.settings


def producer_of(*topics: str) -> definition.Settings:
    """Return the settings of a producer."""
    return definition.Settings(
        client_type=definition.PRODUCER,
        publishing=definition.Publishing(topics=[definition.Resource(name=topic) for topic in topics]),
    )


def consumer_of(group: str, topic: str, expression: str = "*", **fields: Any) -> definition.Settings:
    """Return the settings of a consumer."""
    entry = definition.SubscriptionEntry(
        topic=definition.Resource(name=topic),
        expression=definition.FilterExpression(expression=expression, type=definition.TAG),
    )
    subscription = definition.Subscription(group=definition.Resource(name=group), subscriptions=[entry])
    kind = fields.pop("client_type", definition.SIMPLE_CONSUMER)
    return definition.Settings(client_type=kind, subscription=subscription, **fields)


def message_of(topic: str, body: bytes, message_id: str | None = None, **system: Any) -> definition.Message:
    """Return a message with an id that carries no time, unless one is given."""
    properties = system.pop("user_properties", {})
    return definition.Message(
        topic=definition.Resource(name=topic),
        user_properties=properties,
        system_properties=definition.SystemProperties(
            **{"message_id": message_id or uuid4().hex, "message_type": definition.NORMAL, **system}
        ),
        body=body,
    )


def receive_of(group: str, topic: str, **fields: Any) -> protocol.ReceiveMessageRequest:
    """Return a request for messages that holds them for 30 s and waits for none."""
    request = protocol.ReceiveMessageRequest(
        group=definition.Resource(name=group),
        message_queue=definition.MessageQueue(topic=definition.Resource(name=topic)),
        filter_expression=definition.FilterExpression(expression=fields.pop("expression", "*"), type=definition.TAG),
        batch_size=32,
    )
    request.invisible_duration.FromMilliseconds(round(fields.pop("invisible_s", 30) * 1000))
    request.long_polling_timeout.FromMilliseconds(round(fields.pop("wait_s", 0) * 1000))
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def codes_of(answers: Sequence[Any]) -> list[str]:
    """Return the names of the statuses of answers or entries."""
    return [definition.Code.Name(one.status.code) for one in answers]


class GatewayInProcess:
    """The gateway's parts over a transport to Halfnote, with a gRPC server on a free port."""

    def __init__(
        self, transport: httpx.AsyncBaseTransport | None, credentials: Credentials, url: str, limits: RequestLimits
    ) -> None:
        self.metrics = GatewayMetrics()
        self.buffers = Buffers(limits.buffered_bytes)
        self.api = HalfnoteApi(url, True, self.metrics, self.buffers, transport=transport)
        self.clients = ConnectedClients()
        self.checks = CheckClaims(self.api, self.clients, self.metrics, "grpc")
        self.clients.on_change = self.checks.adjust
        self.renewals = Renewals(self.api, self.clients)
        subscriptions = Subscriptions(self.api)
        self.claiming = Claiming(self.api, subscriptions)
        self.leaving = Leaving(self.claiming, self.renewals)
        self.metrics.watch(
            "grpc",
            clients=lambda: len(self.clients),
            checks=lambda: len(self.checks),
            held=lambda: len(self.renewals),
        )
        self.service = MessagingService(
            credentials,
            self.metrics,
            ClientSessions(self.clients, subscriptions, self.leaving, limits),
            Producing(Storing(self.api, self.checks), self.clients, self.checks, limits.body_bytes),
            Consuming(self.claiming, self.clients, subscriptions, self.renewals),
            limits,
            self.buffers,
        )
        self.connections = self.service.connections
        self.server = grpc_server(limits)
        self.server.add_generic_rpc_handlers((self.service.handler(),))
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    async def start(self) -> None:
        """Serve."""
        await self.server.start()

    async def stop(self) -> None:
        """Stop serving."""
        await self.checks.stop()
        await self.server.stop(0)
        await self.leaving.stop()
        await self.claiming.stop()
        await self.api.aclose()


@asynccontextmanager
async def gateway_over(
    transport: httpx.AsyncBaseTransport | None,
    credentials: Credentials | None = None,
    url: str = "http://localhost",
    **limits: Any,
) -> AsyncIterator[tuple[GatewayInProcess, grpc.aio.Channel]]:
    """Run the gateway in this loop; yield it, and a channel to it. `limits`: other than LIMITS."""
    known = credentials or Credentials(None, ApiKeys(None, None))
    gateway = GatewayInProcess(transport, known, url, replace(LIMITS, **limits))
    await gateway.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            yield gateway, channel
    finally:
        await gateway.stop()
