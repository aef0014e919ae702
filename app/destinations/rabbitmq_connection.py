"""A connection to one allowed address of RabbitMQ, with one channel with publisher confirms.

This module connects the socket, not the client, so that the connected address is the checked one. With TLS the
certificate must be valid for the host's name.
"""

import asyncio
import logging
import ssl
from dataclasses import dataclass
from typing import Any

from aio_pika import Connection
from aio_pika.abc import AbstractChannel, AbstractExchange, ConnectionParameter
from aio_pika.exceptions import AMQPError
from aiormq.connection import TransportFactory
from aiormq.exceptions import InvalidFrameError
from yarl import URL

from app.egress.http_client import AGENT
from app.egress.network_policy import OWN_PORTS, NetworkPolicy

PORTS = {"amqp": 5672, "amqps": 5671}
# How long an orderly close may take.
CLOSE_WITHIN_S = 1.0

# Their errors are in the outcomes, which are logged once.
for _chatty in ("aio_pika", "aiormq"):
    logging.getLogger(_chatty).setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class RabbitAddress:
    """A RabbitMQ server, the exchange and the account. `url`: `amqp[s]://host:port/vhost`, without the account."""

    url: URL
    exchange: str
    username: str
    password: str
    network_policy: NetworkPolicy


class AddressTransportFactory(TransportFactory):
    """Connects to one address, and keeps the transport so that it can be closed at once."""

    def __init__(self, address: str, context: ssl.SSLContext | None) -> None:
        self._address, self._context = address, context
        self._transport: asyncio.WriteTransport | None = None

    async def create(self, url: URL, **_: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect. Raises OSError."""
        name = None if self._context is None else url.host
        reader, writer = await asyncio.open_connection(self._address, url.port, ssl=self._context, server_hostname=name)
        self._transport = writer.transport
        return reader, writer

    def abort(self) -> None:
        """Close the socket at once and drop its unwritten bytes."""
        if self._transport is not None:
            self._transport.abort()


class TransportConnection(Connection):
    """A connection over our own transport factory, which aio-pika passes on to aiormq."""

    PARAMETERS = (ConnectionParameter(name="transport_factory", parser=lambda given: given, is_kwarg=True),)


class RabbitConnection:
    """A connection and its exchange. `last_answer_at`: the time of its last answer, by the event loop's clock.

    `largest`: the most bytes of a body, known once RabbitMQ refused a larger one. It ends with the connection, because
    RabbitMQ may be started again with another limit.
    """

    def __init__(self, broker_address: RabbitAddress, address: str) -> None:
        context = broker_address.network_policy.tls if broker_address.url.scheme == "amqps" else None
        self._transport_factory = AddressTransportFactory(address, context)
        self._connection = TransportConnection(
            broker_address.url.with_user(broker_address.username).with_password(broker_address.password),
            client_properties={"connection_name": AGENT},
            transport_factory=self._transport_factory,
        )
        self._name = broker_address.exchange
        self._channel: AbstractChannel | None = None
        self._exchange: AbstractExchange | None = None
        self._turn = asyncio.Lock()
        self.last_answer_at = 0.0
        self.largest: int | None = None
        self.dropped = False

    @property
    def open(self) -> bool:
        """Whether the connection is usable as far as the client knows."""
        return not self.dropped and self._connection.connected.is_set()

    @property
    def frame_max(self) -> int:
        """The most bytes of a frame, as agreed at the login; 0: no limit."""
        transport = self._connection.transport
        return 0 if transport is None else transport.connection.connection_tune.frame_max

    async def connect(self) -> None:
        """Connect and log in. Raises OSError and AMQPError."""
        await self._connection.connect()

    async def exchange(self) -> AbstractExchange:
        """Return the exchange, on a new channel if RabbitMQ closed the last one. Raises AMQPError and RuntimeError."""
        async with self._turn:
            if self._exchange is None or self.closed(self._exchange):
                self._channel = self._connection.channel(on_return_raises=True)
                await self._channel.initialize()
                # Without a check for its existence: permission to publish does not include that check.
                self._exchange = (
                    await self._channel.get_exchange(self._name, ensure=False)
                    if self._name
                    else self._channel.default_exchange
                )
            return self._exchange

    def closed(self, exchange: AbstractExchange) -> bool:
        """Whether the channel of this exchange is closed: by RabbitMQ, or because the connection broke."""
        return self.replaced(exchange) or self._channel is None or self._channel.is_closed

    def replaced(self, exchange: AbstractExchange) -> bool:
        """Whether RabbitMQ gave a reason for closing the channel of this exchange, or another channel is in use."""
        return exchange is not self._exchange

    def forget(self, exchange: AbstractExchange) -> None:
        """Use another channel than this exchange's, which RabbitMQ closed, from now on."""
        if self._exchange is exchange:
            self._exchange = None

    def drop(self) -> None:
        """Close the socket at once."""
        self.dropped = True
        self._transport_factory.abort()

    async def close(self) -> None:
        """Close in order unless dropped, and end the client's tasks. Never raises."""
        closing = asyncio.create_task(self._connection.close())
        if not self.dropped:
            await asyncio.wait({closing}, timeout=CLOSE_WITHIN_S)
        self.drop()
        await asyncio.gather(closing, return_exceptions=True)


async def connected(broker_address: RabbitAddress) -> RabbitConnection:
    """Return a connection to the first address that accepts the login. Raises the last address's OSError."""
    host, port = broker_address.url.host or "", broker_address.url.port or PORTS[broker_address.url.scheme]
    failure: Exception = OSError(f"{host} has no address")
    encrypted = broker_address.url.scheme == "amqps"
    for address in await broker_address.network_policy.resolved(
        host, port, own_ports=OWN_PORTS["rabbitmq"], encrypted=encrypted
    ):
        connection = RabbitConnection(broker_address, address)
        try:
            await connection.connect()
        except InvalidFrameError:
            # The client gets the reason and does not pass it on.
            failure = OSError(
                f"RabbitMQ does not let user {broker_address.username!r} into the vhost of "
                f"{broker_address.url}: create the vhost, or give the user permissions in it"
            )
            await connection.close()
        except (OSError, AMQPError) as error:
            failure = OSError(error_text(error)) if isinstance(error, AMQPError) else error
            await connection.close()
        except BaseException:
            await connection.close()
            raise
        else:
            return connection
    raise failure


def error_text(error: BaseException) -> str:
    """Return an error's text for people. The client's own errors hold a code and a text, or a text."""
    return (" ".join(map(str, error.args)) if isinstance(error, AMQPError) else str(error)) or type(error).__name__
