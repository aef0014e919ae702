"""One connection to RabbitMQ, to an address that was judged, with one channel that confirms; dropped at any moment.

The address is dialled here and not by the client, so that what was judged is what is connected to. With TLS the
certificate is the name's all the same.
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

from app.callbacks import AGENT
from app.destinations.base import OWN_PORTS
from app.dialling import Dialling

PORTS = {"amqp": 5672, "amqps": 5671}
# How long RabbitMQ may take to say goodbye.
CLOSE_WITHIN_S = 1.0

# Whatever they log is in an outcome as well, and logged once with it.
for _chatty in ("aio_pika", "aiormq"):
    logging.getLogger(_chatty).setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Place:
    """Which RabbitMQ and exchange, and as whom. `url`: `amqp[s]://host:port/vhost`, without an account."""

    url: URL
    exchange: str
    username: str
    password: str
    dialling: Dialling


class Dialler(TransportFactory):
    """Dials one address, and keeps the transport so that it can be closed without a word."""

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
        """Close the socket at once, whatever is still to be written to it."""
        if self._transport is not None:
            self._transport.abort()


class Dialled(Connection):
    """A connection by a transport of our own, which aio-pika hands on to what is below it."""

    PARAMETERS = (ConnectionParameter(name="transport_factory", parser=lambda given: given, is_kwarg=True),)


class RabbitLine:
    """A connection and an exchange on it. `heard_at`: when RabbitMQ answered last, by the loop's time."""

    def __init__(self, place: Place, address: str) -> None:
        context = place.dialling.tls if place.url.scheme == "amqps" else None
        self._dialler = Dialler(address, context)
        self._connection = Dialled(
            place.url.with_user(place.username).with_password(place.password),
            client_properties={"connection_name": AGENT},
            transport_factory=self._dialler,
        )
        self._name = place.exchange
        self._channel: AbstractChannel | None = None
        self._exchange: AbstractExchange | None = None
        self._turn = asyncio.Lock()
        self.heard_at = 0.0
        self.dropped = False

    @property
    def open(self) -> bool:
        """Whether it is of use, as far as is known."""
        return not self.dropped and self._connection.connected.is_set()

    async def connect(self) -> None:
        """Connect and log in. Raises OSError and AMQPError."""
        await self._connection.connect()

    async def exchange(self) -> AbstractExchange:
        """Return the exchange, on a new channel if RabbitMQ closed the last one. Raises AMQPError and RuntimeError."""
        async with self._turn:
            if self._exchange is None or self.closed(self._exchange):
                self._channel = self._connection.channel(on_return_raises=True)
                await self._channel.initialize()
                # It is not looked for: whoever may write to it may not always look.
                self._exchange = (
                    await self._channel.get_exchange(self._name, ensure=False)
                    if self._name
                    else self._channel.default_exchange
                )
            return self._exchange

    def closed(self, exchange: AbstractExchange) -> bool:
        """Whether RabbitMQ closed the channel that this exchange was on."""
        return exchange is not self._exchange or self._channel is None or self._channel.is_closed

    def forget(self, exchange: AbstractExchange) -> None:
        """Use another channel from now on than this exchange's, which RabbitMQ closed."""
        if self._exchange is exchange:
            self._exchange = None

    def drop(self) -> None:
        """Let go of the socket at once."""
        self.dropped = True
        self._dialler.abort()

    async def close(self) -> None:
        """Say goodbye if anybody listens, and end all that the client runs. Never raises."""
        closing = asyncio.create_task(self._connection.close())
        if not self.dropped:
            await asyncio.wait({closing}, timeout=CLOSE_WITHIN_S)
        self.drop()
        await asyncio.gather(closing, return_exceptions=True)


async def connected(place: Place) -> RabbitLine:
    """Return a line to the first address that lets us in. Raises OSError, of the last one."""
    host, port = place.url.host or "", place.url.port or PORTS[place.url.scheme]
    failure: Exception = OSError(f"{host} has no address")
    encrypted = place.url.scheme == "amqps"
    for address in await place.dialling.resolved(host, port, own_ports=OWN_PORTS["rabbitmq"], encrypted=encrypted):
        line = RabbitLine(place, address)
        try:
            await line.connect()
        except InvalidFrameError:
            # The client is told why and keeps it to itself.
            failure = OSError(
                f"RabbitMQ does not let user {place.username!r} into the vhost of {place.url}: it must exist, and the "
                "user needs permissions in it"
            )
            await line.close()
        except (OSError, AMQPError) as error:
            failure = OSError(told(error)) if isinstance(error, AMQPError) else error
            await line.close()
        except BaseException:
            await line.close()
            raise
        else:
            return line
    raise failure


def told(error: BaseException) -> str:
    """Return an error as a person may read it: the client's own are tuples of a code and a text, or of a text."""
    return (" ".join(map(str, error.args)) if isinstance(error, AMQPError) else str(error)) or type(error).__name__
