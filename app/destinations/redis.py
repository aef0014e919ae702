"""Deliver to Redis Streams: one entry a message (`XADD`), a call's messages in one pipeline.

An entry's fields: `body` (the producer's bytes), `content-type`, `ce_<attribute>` as CloudEvents' Kafka binding names
them (there is none for Redis), `halfnote-…` and the message's own headers as `halfnote-h-<name>`; values are UTF-8.

The server decides what acknowledged means: Redis answers when the entry is in its memory. With `appendonly yes` and
`appendfsync everysec`, its default, a crash of the machine can lose the last second of acknowledged entries;
`appendfsync always` answers only after the fsync. Replication is asynchronous: a failover can lose entries too. `WAIT`
is not sent: it counts replicas that have the entry in memory, makes nothing durable, blocks the whole connection, and a
failover may choose another replica. Set `appendfsync always` if no entry may be lost.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Connection
from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from app.delivery import Delivered, Delivery, Failed, Outcome, Refused
from app.destinations.base import Destination
from app.destinations.cloudevents import attributes, own_headers
from app.destinations.name_templates import filled
from app.egress.http_client import AGENT
from app.egress.network_policy import OWN_PORTS, NetworkPolicy
from app.observability.trace_context import trace_headers

# The most messages of one pipeline. A larger one gains nothing.
BATCH_MAX = 500
PORT = 6379
# The server's default for the largest value, `proto-max-bulk-len`.
LARGEST_BYTES = 512 * 1024 * 1024
TOO_LARGE = "too_large"


def of(
    destination: Mapping[str, Any], credentials: Mapping[str, str], timeout_s: float, network_policy: NetworkPolicy
) -> Destination:
    """Return the destination of a stored `{type: "redis", url, stream?, maxlen?, username?}`."""
    return Redis(
        destination["url"],
        destination.get("stream") or "{topic}",
        destination.get("maxlen"),
        (destination.get("username"), credentials.get("password")),
        timeout_s,
        network_policy,
    )


class CheckedConnection(Connection):
    """A connection to a checked address. With TLS the certificate must be valid for the host's name."""

    def __init__(self, *, address: str, tls: ssl.SSLContext | None, **options: Any) -> None:
        super().__init__(**options)
        self._address, self._tls = address, tls
        self._transport: asyncio.WriteTransport | None = None

    def _connection_arguments(self) -> Mapping[str, Any]:
        arguments = {**super()._connection_arguments(), "host": self._address}
        return arguments if self._tls is None else {**arguments, "ssl": self._tls, "server_hostname": self.host}

    async def _connect(self) -> None:
        await super()._connect()  # type: ignore[no-untyped-call]
        self._transport = self._writer.transport if self._writer is not None else None

    @property
    def ended(self) -> bool:
        """Whether the socket is closed, also by a reset, which `can_read` does not see."""
        return not self.is_connected or self._transport is None or self._transport.is_closing()

    async def drop(self) -> None:
        """Close the socket at once and drop its unwritten bytes."""
        if self._transport is not None:
            self._transport.abort()
        await self.disconnect()


class TooLarge(Exception):
    """The server takes no value of this size. It is not sent: the server would close the connection."""


class Redis:
    """One stream, or several by placeholders, on one connection. Calls take turns on it, which keeps their order."""

    batch_max = BATCH_MAX

    def __init__(
        self,
        url: str,
        stream: str,
        maxlen: int | None,
        account: tuple[str | None, str | None],
        timeout_s: float,
        network_policy: NetworkPolicy,
    ) -> None:
        self.address = url
        self._url = urlsplit(url)
        self._stream = stream
        self._trim = ("MAXLEN", "~", str(maxlen)) if maxlen else ()
        self._account = account
        self._timeout_s = timeout_s
        self._network_policy = network_policy
        self._turn = asyncio.Lock()
        self._connection: CheckedConnection | None = None
        self._largest = LARGEST_BYTES

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Add entries in one pipeline. Each has its own outcome, also if the connection breaks in between.

        If a connection of earlier calls breaks before the first reply, the pipeline is sent once more on a new one.
        """
        started = perf_counter()
        replies: list[Exception | None] = []
        sent, error, unreachable = False, "", False
        try:
            async with asyncio.timeout(self._timeout_s), self._turn:
                former = self._connection
                while True:
                    connection = await self._connected()
                    sent = True
                    try:
                        await self._add(connection, deliveries, replies)
                        break
                    except (RedisError, OSError):
                        # Only a connection of earlier calls may have ended before: then send once more.
                        if connection is not former or replies:
                            raise
                        await self.close()
        except TimeoutError:
            error = f"no answer within {self._timeout_s:g} s"
        except (RedisError, OSError) as failure:
            error = f"{type(failure).__name__}: {failure}"
            # The server still loads its data from disk.
            unreachable = isinstance(failure, BusyLoadingError)
        unreachable = unreachable or (not sent and self._connection is None)
        duration_ms = round((perf_counter() - started) * 1000)
        outcomes: list[Outcome] = [
            self._outcome(delivery, reply, duration_ms) for delivery, reply in zip(deliveries, replies, strict=False)
        ]
        lost = Failed(error, None, None, None, duration_ms, unreachable)
        return outcomes + [lost] * (len(deliveries) - len(outcomes))

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.drop()

    async def _connected(self) -> CheckedConnection:
        connection = self._connection
        if connection is not None:
            # Bytes to read before a request: the server closed the connection, or announces it.
            if not connection.ended and not await connection.can_read():
                return connection
            await self.close()
        host, port = self._url.hostname or "", self._url.port or PORT
        addresses = await self._network_policy.resolved(
            host, port, own_ports=OWN_PORTS["redis"], encrypted=self._url.scheme == "rediss"
        )
        for address in addresses:
            connection = self._new_connection(host, port, address)
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                self._largest = await _largest(connection)
            except BaseException as failure:
                await connection.drop()
                if address != addresses[-1] and isinstance(failure, OSError | RedisError):
                    continue
                raise
            self._connection = connection
            return connection
        raise OSError(f"{host} has no address")

    def _new_connection(self, host: str, port: int, address: str) -> CheckedConnection:
        username, password = self._account
        return CheckedConnection(
            address=address,
            tls=self._network_policy.tls if self._url.scheme == "rediss" else None,
            host=host,
            port=port,
            db=int(self._url.path.strip("/") or 0),
            username=username,
            password=password,
            protocol=2,
            driver_info=None,
            client_name=AGENT,
            # The call's own deadline covers connecting.
            socket_timeout=None,
            socket_connect_timeout=None,
        )

    async def _add(
        self, connection: CheckedConnection, deliveries: Sequence[Delivery], replies: list[Exception | None]
    ) -> None:
        """Send the messages that fit, and append one reply for each message to `replies`: None, or its error."""
        try:
            if max(len(delivery.body) for delivery in deliveries) > self._largest:
                # The limit may have been raised since the connection was made.
                self._largest = await _largest(connection)
            fits = [len(delivery.body) <= self._largest for delivery in deliveries]
            commands = [self._entry(delivery) for delivery, fit in zip(deliveries, fits, strict=True) if fit]
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for fit in fits:
                replies.append(await _reply(connection) if fit else TooLarge())
        except BaseException:
            await self.close()
            raise
        if any(isinstance(reply, ReadOnlyError) or _is_too_large(reply) for reply in replies):
            # A failover may have moved the name to another server. After a protocol error the server closes.
            await self.close()

    def _entry(self, delivery: Delivery) -> tuple[str | bytes, ...]:
        entry: list[str | bytes] = ["XADD", filled(self._stream, delivery), *self._trim, "*"]
        entry += ("body", delivery.body, "content-type", delivery.content_type)
        for name, value in attributes(delivery).items():
            if name != "datacontenttype":
                entry += ("ce_" + name, value)
        for name, value in {**own_headers(delivery), **trace_headers(delivery.trace)}.items():
            entry += (name, value)
        return tuple(entry)

    def _outcome(self, delivery: Delivery, reply: Exception | None, duration_ms: int) -> Outcome:
        if reply is None:
            return Delivered(None, duration_ms)
        text = str(reply)
        if isinstance(reply, TooLarge) or _is_too_large(reply):
            most = f"this Redis takes at most {self._largest:,}" if not text else "more than this Redis takes"
            error = f"a body of {len(delivery.body):,} bytes; {most} (proto-max-bulk-len)"
            return Refused(TOO_LARGE, error, None, text or None, duration_ms)
        if text.startswith("WRONGTYPE"):
            key = filled(self._stream, delivery)
            error = f"the key {key} holds another type than a stream; remove the key, or name another stream"
        elif isinstance(reply, OutOfMemoryError):
            error = "Redis has reached its maxmemory and takes no writes: free memory, or raise maxmemory"
        elif isinstance(reply, ReadOnlyError):
            error = "this Redis is a replica, which takes no writes; name the primary"
        else:
            error = f"XADD failed: {text}"
        return Failed(error, None, text, None, duration_ms)


def _is_too_large(reply: Exception | None) -> bool:
    return str(reply).startswith("Protocol error: invalid bulk length")


async def _reply(connection: Connection) -> Exception | None:
    try:
        await connection.read_response()
    except ResponseError as refusal:
        return refusal
    return None


async def _largest(connection: Connection) -> int:
    """Return the server's `proto-max-bulk-len`; the default where CONFIG is not allowed (managed services)."""
    try:
        await connection.send_command("CONFIG", "GET", "proto-max-bulk-len", check_health=False)
        answer = await connection.read_response()
    except ResponseError:
        return LARGEST_BYTES
    return int(answer[1]) if answer else LARGEST_BYTES
