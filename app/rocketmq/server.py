"""The gateway's process: a gRPC server, the claims of checks, and renewals."""

import asyncio
import contextlib
import logging
import signal
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import structlog

from app.rocketmq.buffers import Buffers
from app.rocketmq.checks import CheckClaims
from app.rocketmq.claiming import Claiming
from app.rocketmq.clients import ConnectedClients
from app.rocketmq.connection_limit import SPARE
from app.rocketmq.consuming import Consuming
from app.rocketmq.credentials import Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.leaving import Leaving
from app.rocketmq.open_files import raise_open_files
from app.rocketmq.operations_server import OperationsServer
from app.rocketmq.producing import Producing
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from app.rocketmq.renewals import Renewals
from app.rocketmq.request_limits import RequestLimits
from app.rocketmq.service import MessagingService
from app.rocketmq.sessions import ClientSessions
from app.rocketmq.storing import Storing
from app.rocketmq.subscriptions import Subscriptions

log = structlog.get_logger(__name__)

# A larger request ends with an error of gRPC's; a body above the limit, but below this, gets a status.
REQUEST_ROOM_BYTES = 12 * 1024 * 1024
# A connection that has not begun to speak the protocol ends after this time.
HANDSHAKE_MS = 20_000
# A client that disappears without a word is noticed: the server pings after a time without a word, and waits for the
# answer. The sum is less than BREAK_NOTICED_S.
PING_AFTER_MS, PING_ANSWERED_MS = 60_000, 20_000
# A connection without a call ends after this time. A client has a stream of settings, which is a call.
IDLE_MS = 120_000
STREAMS_MAX = 1000
# For each connection that the gateway takes: a stream of settings, and receives that wait, one for each topic.
CALLS_PER_CONNECTION = 16
# The refusals at the end of the drain are sent in this time.
REFUSED_WITHIN_S = 1.0
# During the drain the process looks so often, in seconds, whether a call still runs. After so many looks without one it
# ends what gRPC still holds.
LOOK_S, IDLE_LOOKS = 0.5, 4
# The logger of gRPC, and its error when it cannot send an answer because the call has ended.
GRPC_LOGGER, NOT_SENT = "grpc._cython.cygrpc", "ExecuteBatchError"


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Where the gateway listens, and what it calls.

    `remoting_port`: None serves no remoting clients. `remoting_addresses`: of all gateways. `operations_port`: for
    probes and metrics; None: without them.
    """

    url: str
    verify: ssl.SSLContext | bool
    host: str
    port: int
    credentials: Credentials
    limits: RequestLimits
    certificate: tuple[Path, Path] | None
    remoting_port: int | None = None
    remoting_addresses: tuple[str, ...] = ()
    operations_port: int | None = None


class CannotListen(Exception):
    """The address is taken or not of this machine, or the certificate is unusable."""


async def serve_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. Raises CannotListen."""
    logging.getLogger(GRPC_LOGGER).addFilter(_without_ended_calls)
    raise_open_files(options.limits.connections * (1 if options.remoting_port is None else 2))
    metrics = GatewayMetrics()
    operations = OperationsServer(metrics)
    buffers = Buffers(options.limits.buffered_bytes)
    metrics.watch_buffered(lambda: buffers.held)
    api = HalfnoteApi(options.url, options.verify, metrics, buffers)
    clients = ConnectedClients()
    checks = CheckClaims(api, clients, metrics, "grpc")
    clients.on_change = checks.adjust
    subscriptions, renewals = Subscriptions(api), Renewals(api, clients)
    claiming = Claiming(api, subscriptions)
    leaving = Leaving(claiming, renewals)
    service = MessagingService(
        options.credentials,
        metrics,
        ClientSessions(clients, subscriptions, leaving, options.limits),
        Producing(Storing(api, checks), clients, checks, options.limits.body_bytes),
        Consuming(claiming, clients, subscriptions, renewals),
        options.limits,
        buffers,
    )
    metrics.watch("grpc", clients=lambda: len(clients), checks=lambda: len(checks), held=lambda: len(renewals))
    server = grpc_server(options.limits)
    server.add_generic_rpc_handlers((service.handler(),))
    port = _listen(server, options)
    remoting = RemotingGateway(
        api, subscriptions, options.credentials, options.limits, metrics, options.remoting_addresses
    )
    remoting_port = await _listen_for_remoting(remoting, options)
    operations_port = await _listen_for_operations(operations, options)
    ended = asyncio.Event()
    for one in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(one, ended.set)
    renewing = asyncio.create_task(renewals.run())
    await server.start()
    operations.ready = True
    log.info(
        "rocketmq_gateway_started",
        host=options.host,
        port=port,
        remoting_port=remoting_port,
        operations_port=operations_port,
        tls=options.certificate is not None,
        url=api.shown_url,
    )
    try:
        await ended.wait()
    finally:
        operations.ready = False
        await checks.stop()
        renewing.cancel()
        clients.close()
        service.stop()
        # At the same time, so that the process ends after one drain.
        await asyncio.gather(remoting.stop(), drain(server, service, options.limits.drain_s))
        await leaving.stop()
        await claiming.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await renewing
        await operations.stop()
        await api.aclose()


async def drain(server: grpc.aio.Server, service: MessagingService, drain_s: float) -> None:
    """Stop the server. Calls that run after `drain_s` seconds are refused; gRPC would cancel them, with tracebacks.

    gRPC may hold a call that it has handed to no handler, if the call came as the server began to stop. No call then
    runs here, and gRPC waits for as long as it may.
    """
    stopping = asyncio.create_task(server.stop(drain_s + REFUSED_WITHIN_S))
    until, idle_looks = time.monotonic() + drain_s, 0
    while not stopping.done() and idle_looks < IDLE_LOOKS and (left_s := until - time.monotonic()) > 0:
        await asyncio.wait((stopping,), timeout=min(left_s, LOOK_S))
        idle_looks = idle_looks + 1 if service.is_idle else 0
    if idle_looks >= IDLE_LOOKS:
        await server.stop(None)
    else:
        service.give_up()
    await stopping


def _without_ended_calls(record: logging.LogRecord) -> bool:
    """Return False for the answer to a call that has ended.

    gRPC says nothing of it if it knows already that the client has left. It learns so too late where it ends the call
    itself, as with a request that is too large uncompressed: the handler then answers that no request came.
    """
    return record.exc_info is None or record.exc_info[0] is None or record.exc_info[0].__name__ != NOT_SENT


def _calls_max(limits: RequestLimits) -> int:
    """Return how many calls the process takes at once. gRPC refuses more, acknowledgements and heartbeats too."""
    # One client may have all of its streams, however few connections there are.
    return STREAMS_MAX + CALLS_PER_CONNECTION * limits.connections


def grpc_server(limits: RequestLimits) -> grpc.aio.Server:
    """Return a server with the gateway's limits, which has no methods yet and does not listen."""
    return grpc.aio.server(options=_channel_options(limits), maximum_concurrent_rpcs=_calls_max(limits))


def _channel_options(limits: RequestLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.body_bytes + REQUEST_ROOM_BYTES),
        ("grpc.max_send_message_length", -1),
        # Even more are ended as soon as they connect. Calls of those above the limit get a status.
        ("grpc.max_allowed_incoming_connections", limits.connections + SPARE),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Of one connection. A client that has more calls waits, and takes none from others.
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        # Two processes on one port would hide that the first still runs.
        ("grpc.so_reuseport", 0),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        # Clients ping streams on which nothing is said.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_time_ms", PING_AFTER_MS),
        ("grpc.keepalive_timeout_ms", PING_ANSWERED_MS),
        # Its default of a minute would count instead.
        ("grpc.http2.ping_timeout_ms", PING_ANSWERED_MS),
    ]


def _listen(server: grpc.aio.Server, options: GatewayOptions) -> int:
    address = f"[{options.host}]:{options.port}" if ":" in options.host else f"{options.host}:{options.port}"
    try:
        if options.certificate is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _tls(*options.certificate))
    except (RuntimeError, OSError, ValueError) as error:
        raise CannotListen(f"The gateway cannot listen on {address}: {error}") from None


async def _listen_for_remoting(remoting: RemotingGateway, options: GatewayOptions) -> int | None:
    if options.remoting_port is None:
        return None
    context = None
    if options.certificate is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*options.certificate)
    try:
        return await remoting.start(options.host, options.remoting_port, context)
    except OSError as error:
        address = f"{options.host}:{options.remoting_port}"
        raise CannotListen(f"The gateway cannot listen on {address} for remoting clients: {error}") from None


async def _listen_for_operations(operations: OperationsServer, options: GatewayOptions) -> int | None:
    if options.operations_port is None:
        return None
    try:
        return await operations.start(options.host, options.operations_port)
    except OSError as error:
        address = f"{options.host}:{options.operations_port}"
        raise CannotListen(f"The gateway cannot listen on {address} for probes and metrics: {error}") from None


def _tls(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """Return credentials that are read again when a file changes, so that a renewed certificate needs no restart."""
    read = _CertificateFiles(certificate, key)
    # None means that nothing changed; the stubs do not know it.
    return grpc.dynamic_ssl_server_credentials(read.configuration(), read.if_changed)  # type: ignore[arg-type]


class _CertificateFiles:
    """A certificate chain and its key, in PEM files."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._changed_at = self._stamp()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """Read the files. Raises OSError, of which SSLError is one."""
        # Files that are not of one pair yet would fail every handshake.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*self._files)
        certificate, key = (file.read_bytes() for file in self._files)
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def if_changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Read the files if they changed; None: what is known is still right, or the files cannot be read now."""
        try:
            stamp = self._stamp()
            if stamp == self._changed_at:
                return None
            read = self.configuration()
        except OSError as error:
            log.warning("rocketmq_certificate_not_read", error=str(error))
            return None
        self._changed_at = stamp
        return read

    def _stamp(self) -> tuple[int, ...]:
        return tuple(file.stat().st_mtime_ns for file in self._files)
