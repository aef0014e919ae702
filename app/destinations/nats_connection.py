"""A connection to one allowed address of NATS. Many messages wait on it for JetStream's acknowledgements.

nats-py's own reconnecting is off: it buffers messages and sends them later without our knowledge. Its `publish_async`
is not used: it never answers a message that JetStream refused (2.16). The socket is ours, set as its `_transport`, a
name that nats-py may change. So the connected address is the checked one, TLS starts
before the password is sent, and the socket can be closed at once.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.errors import Error

from app.egress.http_client import AGENT
from app.egress.network_policy import OWN_PORTS, NetworkPolicy

PORT = 4222
# How long an orderly close may take.
CLOSE_WITHIN_S = 1.0
# Seconds between pings. After two pings without an answer the connection is closed.
PING_S = 20
BUFFER_BYTES = 64 * 1024
NO_RESPONDERS = "503"

# nats-py passes the server's errors on in lower case.
_not_permitted = re.compile(r"permissions violation for publish to \"(.*)\"").search


class NoStream(Exception):
    """No stream has the subject, or the server has no JetStream."""


class NotStored(Exception):
    """JetStream did not store the message: `number` is its `err_code`."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class NotPermitted(Exception):
    """The account may not publish to the subject."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """A NATS server and the account: `account` is nats-py's `user` and `password`, or `token`, or empty."""

    url: SplitResult
    account: Mapping[str, Any]
    network_policy: NetworkPolicy


def failure_of(answer: bytes) -> NotStored | None:
    """Return why an answer is no acknowledgement; None if JetStream says in which stream and where it stored it.

    Anyone who subscribes to the subject can answer too, and without a stream no one else does.
    """
    try:
        told = json.loads(answer)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        told = {}
    error, stream, place = told.get("error"), told.get("stream"), told.get("seq")
    if isinstance(error, dict):
        return NotStored(error.get("err_code", 0), error.get("description", ""))
    if error is None and isinstance(stream, str) and isinstance(place, int) and place > 0:
        return None
    return NotStored(0, "the answer is not JetStream's: a subscriber listens on the subject too")


class ConnectedTransport(TcpTransport):
    """A socket that is already connected. With `secure` it writes nothing before TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, secure: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer
        self._insecure = secure
        self._aborted = False

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        """Do nothing: the socket is connected."""

    async def connect_tls(self, *given: Any, **named: Any) -> None:
        """Start TLS on the socket."""
        await super().connect_tls(*given, **named)
        self._insecure = False

    def write(self, payload: bytes) -> None:
        """Write. Raises OSError before TLS: the first write sends the password."""
        if self._insecure:
            raise OSError("NATS offers no TLS at this address, and tls:// requires it")
        super().write(payload)  # type: ignore[no-untyped-call]

    async def drain(self) -> None:
        """Wait for room in the buffer. An aborted socket writes nothing more, so its errors do not count."""
        try:
            await super().drain()  # type: ignore[no-untyped-call]
        except OSError:
            if not self._aborted:
                raise

    async def wait_closed(self) -> None:
        """Wait until the socket is closed; do not wait after `abort`.

        After a failed TLS handshake no event would end the wait.
        """
        if not self._aborted:
            await super().wait_closed()  # type: ignore[no-untyped-call]

    def abort(self) -> None:
        """Close the socket at once and drop its unwritten bytes."""
        self._aborted = True
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class NatsConnection:
    """A connection. `last_answer_at`: the time of JetStream's last answer, by the event loop's clock."""

    def __init__(self, transport: ConnectedTransport) -> None:
        self._transport = transport
        self._client = Client()
        self._client._transport = transport
        self._inbox = ""
        self._numbers = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[None]]] = {}
        self._failure = "the connection was closed"
        self.last_answer_at = 0.0
        self.dropped = False

    @property
    def open(self) -> bool:
        """Whether the connection is usable as far as the client knows."""
        return not self.dropped and self._client.is_connected

    @property
    def largest(self) -> int:
        """The most bytes of headers and body that NATS takes (`max_payload`, from its greeting)."""
        return self._client.max_payload

    async def connect(self, broker_address: NatsAddress, timeout_s: float) -> None:
        """Log in and listen for acknowledgements. Raises OSError and nats.errors.Error."""
        await self._client.connect(
            # Any name: the transport is connected already.
            f"nats://{AGENT}",
            name=AGENT,
            allow_reconnect=False,
            # Longer than the callers wait.
            connect_timeout=int(timeout_s) + 5,
            ping_interval=PING_S,
            # No wait while publishing: the callers bound the number of pending messages.
            pending_size=0,
            tls=broker_address.network_policy.tls,
            tls_hostname=broker_address.url.hostname,
            error_cb=self._erred,
            disconnected_cb=self._ended,
            closed_cb=self._ended,
            **broker_address.account,
        )
        inbox = self._client.new_inbox()
        await self._client.subscribe(f"{inbox}.*", cb=self._answered)
        self._inbox = inbox

    @contextmanager
    def answers(self) -> Iterator[list[asyncio.Future[None]]]:
        """Yield a list for answers, and cancel those that are still pending at the end."""
        asked: list[asyncio.Future[None]] = []
        try:
            yield asked
        finally:
            for answer in asked:
                answer.cancel()

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str]) -> asyncio.Future[None]:
        """Send a message. The future ends with the answer, or with NoStream, NotStored, NotPermitted or OSError.

        Raises nats.errors.Error.
        """
        self._numbers += 1
        token = str(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[token] = subject, answer

        def forget(answer: asyncio.Future[None]) -> None:
            del self._waiting[token]
            # Retrieves the exception: its caller may have stopped waiting.
            if not answer.cancelled():
                answer.exception()

        answer.add_done_callback(forget)
        try:
            await self._client.publish(subject, body, f"{self._inbox}.{token}", headers={**headers})
        except BaseException:
            answer.cancel()
            raise
        return answer

    def drop(self) -> None:
        """Close the socket at once and fail the pending messages."""
        self.dropped = True
        self._transport.abort()
        self._fail_waiting(OSError(self._failure))

    async def close(self) -> None:
        """Close in order unless dropped, and end the client's tasks. Never raises."""
        closing = asyncio.create_task(self._client.close())
        if not self.dropped:
            await asyncio.wait({closing}, timeout=CLOSE_WITHIN_S)
        self.drop()
        await asyncio.gather(closing, return_exceptions=True)

    async def _answered(self, message: Msg) -> None:
        _, answer = self._waiting.get(message.subject.rpartition(".")[2], ("", None))
        if answer is None or answer.done():
            return
        self.last_answer_at = asyncio.get_running_loop().time()
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            answer.set_exception(NoStream())
            return
        failure = failure_of(message.data)
        if failure is None:
            answer.set_result(None)
        else:
            answer.set_exception(failure)

    async def _erred(self, error: Exception) -> None:
        refused = _not_permitted(str(error))
        if refused is None:
            self._failure = str(error) or self._failure
            return
        for subject, answer in list(self._waiting.values()):
            if subject.lower() == refused[1] and not answer.done():
                answer.set_exception(NotPermitted(str(error)))

    async def _ended(self) -> None:
        self._fail_waiting(OSError(self._failure))

    def _fail_waiting(self, error: OSError) -> None:
        for _, answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(error)


async def connected(broker_address: NatsAddress, timeout_s: float) -> NatsConnection:
    """Return a connection to the first address that accepts the login. Raises the last address's OSError."""
    host, port = broker_address.url.hostname or "", broker_address.url.port or PORT
    failure: Exception = OSError(f"{host} has no address")
    encrypted = broker_address.url.scheme == "tls"
    for address in await broker_address.network_policy.resolved(
        host, port, own_ports=OWN_PORTS["nats"], encrypted=encrypted
    ):
        try:
            reader, writer = await asyncio.open_connection(address, port, limit=BUFFER_BYTES)
        except OSError as error:
            failure = error
            continue
        connection = NatsConnection(ConnectedTransport(reader, writer, secure=encrypted))
        try:
            await connection.connect(broker_address, timeout_s)
        except (OSError, Error) as error:
            failure = OSError(str(error) or type(error).__name__)
            connection.drop()
            await connection.close()
        except BaseException:
            connection.drop()
            await connection.close()
            raise
        else:
            return connection
    raise failure
