"""One connection to NATS, to an address that was judged, on which many messages wait for JetStream's acknowledgement.

nats-py's own reconnecting is off: it would keep messages in a buffer and send them later, unseen. Its `publish_async`
is not used: it leaves a message that JetStream refused without an answer (2.16). The socket is ours, put in its
`_transport`, which it does not promise to keep: hence the bound in pyproject.toml. So what was judged is what is
connected to, TLS is insisted on before the password goes out, and the socket can be closed without a word.
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

from app.callbacks import AGENT
from app.destinations.base import OWN_PORTS
from app.dialling import Dialling

PORT = 4222
# How long NATS may take to say goodbye.
CLOSE_WITHIN_S = 1.0
# How often NATS is asked whether it is still there; twice without an answer it is not.
PING_S = 20
BUFFER_BYTES = 64 * 1024
NO_RESPONDERS = "503"

# nats-py hands the server's errors on in small letters.
_not_permitted = re.compile(r"permissions violation for publish to \"(.*)\"").search


class NoStream(Exception):
    """No stream has the subject, or JetStream is not there at all."""


class NotStored(Exception):
    """JetStream did not store the message: `number` is its `err_code`."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class NotPermitted(Exception):
    """The account may not publish to the subject."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which NATS, and as whom: `account` are nats-py's `user` and `password`, or `token`, or nothing."""

    url: SplitResult
    account: Mapping[str, Any]
    dialling: Dialling


class Dialled(TcpTransport):
    """A socket that is connected already. With `secure` nothing is written to it before TLS is."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, secure: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bare_io_reader = self._io_reader = reader
        self._bare_io_writer = self._io_writer = writer
        self._insecure = secure
        self._aborted = False

    async def connect(self, uri: Any, buffer_size: int, connect_timeout: int) -> None:
        """Nothing is left to do."""

    async def connect_tls(self, *given: Any, **named: Any) -> None:
        """Go on with TLS."""
        await super().connect_tls(*given, **named)
        self._insecure = False

    def write(self, payload: bytes) -> None:
        """Write, unless what is written first, the password, would go out in plain text."""
        if self._insecure:
            raise OSError("NATS offers no TLS there, and tls:// insists on it")
        super().write(payload)  # type: ignore[no-untyped-call]

    async def drain(self) -> None:
        """Wait until there is room; nothing is written any more once the socket was closed."""
        try:
            await super().drain()  # type: ignore[no-untyped-call]
        except OSError:
            if not self._aborted:
                raise

    async def wait_closed(self) -> None:
        """Wait until it is closed; if it was closed at once, there is nothing to wait for.

        And after a failed TLS handshake nothing would ever tell that it is.
        """
        if not self._aborted:
            await super().wait_closed()  # type: ignore[no-untyped-call]

    def abort(self) -> None:
        """Close the socket at once, whatever is still to be written to it."""
        self._aborted = True
        if self._io_writer is not None:
            self._io_writer.transport.abort()


class NatsLine:
    """A connection. `heard_at`: when JetStream answered last, by the loop's time."""

    def __init__(self, transport: Dialled) -> None:
        self._transport = transport
        self._client = Client()
        self._client._transport = transport
        self._inbox = ""
        self._numbers = 0
        self._waiting: dict[str, tuple[str, asyncio.Future[None]]] = {}
        self._failure = "the connection was closed"
        self.heard_at = 0.0
        self.dropped = False

    @property
    def open(self) -> bool:
        """Whether it is of use, as far as is known."""
        return not self.dropped and self._client.is_connected

    @property
    def largest(self) -> int:
        """How many bytes of headers and body NATS takes (`max_payload`, as it said when it was connected)."""
        return self._client.max_payload

    async def connect(self, place: Place, timeout_s: float) -> None:
        """Log in and listen for acknowledgements. Raises OSError and nats.errors.Error."""
        await self._client.connect(
            # Whatever it is called: it is connected already.
            f"nats://{AGENT}",
            name=AGENT,
            allow_reconnect=False,
            # Longer than whoever waits for it does.
            connect_timeout=int(timeout_s) + 5,
            ping_interval=PING_S,
            # Nothing to wait for while publishing: how much is on its way is bounded by who calls.
            pending_size=0,
            tls=place.dialling.tls,
            tls_hostname=place.url.hostname,
            error_cb=self._erred,
            disconnected_cb=self._ended,
            closed_cb=self._ended,
            **place.account,
        )
        inbox = self._client.new_inbox()
        await self._client.subscribe(f"{inbox}.*", cb=self._answered)
        self._inbox = inbox

    @contextmanager
    def answers(self) -> Iterator[list[asyncio.Future[None]]]:
        """Forget, in the end, what was still waited for."""
        asked: list[asyncio.Future[None]] = []
        try:
            yield asked
        finally:
            for answer in asked:
                answer.cancel()

    async def publish(self, subject: str, body: bytes, headers: Mapping[str, str]) -> asyncio.Future[None]:
        """Send a message; the future ends as JetStream answers, with NoStream, NotStored, NotPermitted or OSError.

        Raises nats.errors.Error.
        """
        self._numbers += 1
        token = str(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[token] = subject, answer

        def forget(answer: asyncio.Future[None]) -> None:
            del self._waiting[token]
            # Whoever waited may have given up.
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
        """Let go of the socket at once."""
        self.dropped = True
        self._transport.abort()
        self._tell(OSError(self._failure))

    async def close(self) -> None:
        """Say goodbye if anybody listens, and end all that the client runs. Never raises."""
        closing = asyncio.create_task(self._client.close())
        if not self.dropped:
            await asyncio.wait({closing}, timeout=CLOSE_WITHIN_S)
        self.drop()
        await asyncio.gather(closing, return_exceptions=True)

    async def _answered(self, message: Msg) -> None:
        _, answer = self._waiting.get(message.subject.rpartition(".")[2], ("", None))
        if answer is None or answer.done():
            return
        self.heard_at = asyncio.get_running_loop().time()
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            answer.set_exception(NoStream())
            return
        try:
            error = json.loads(message.data).get("error")
        except (ValueError, AttributeError):
            answer.set_exception(NotStored(0, "what answered is not JetStream; a subscriber has the subject too"))
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(NotStored(error.get("err_code", 0), error.get("description", "")))

    async def _erred(self, error: Exception) -> None:
        refused = _not_permitted(str(error))
        if refused is None:
            self._failure = str(error) or self._failure
            return
        for subject, answer in list(self._waiting.values()):
            if subject.lower() == refused[1] and not answer.done():
                answer.set_exception(NotPermitted(str(error)))

    async def _ended(self) -> None:
        self._tell(OSError(self._failure))

    def _tell(self, error: OSError) -> None:
        for _, answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(error)


async def connected(place: Place, timeout_s: float) -> NatsLine:
    """Return a line to the first address that lets us in. Raises OSError, of the last one."""
    host, port = place.url.hostname or "", place.url.port or PORT
    failure: Exception = OSError(f"{host} has no address")
    encrypted = place.url.scheme == "tls"
    for address in await place.dialling.resolved(host, port, own_ports=OWN_PORTS["nats"], encrypted=encrypted):
        try:
            reader, writer = await asyncio.open_connection(address, port, limit=BUFFER_BYTES)
        except OSError as error:
            failure = error
            continue
        line = NatsLine(Dialled(reader, writer, secure=encrypted))
        try:
            await line.connect(place, timeout_s)
        except (OSError, Error) as error:
            failure = OSError(str(error) or type(error).__name__)
            line.drop()
            await line.close()
        except BaseException:
            line.drop()
            await line.close()
            raise
        else:
            return line
    raise failure
