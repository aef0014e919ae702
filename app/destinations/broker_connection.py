"""One connection for all calls of a destination: made on demand, dropped when it breaks or stops answering.

A call sends its messages, and sends those again that have no outcome because the connection broke or another message
closed the channel, until each has an outcome or the time is over. So every outcome comes within `timeout_s`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from app.delivery import Delivered, Delivery, Failed, Outcome, Refused
from app.destinations.base import current_task_cancelled

TOO_LARGE, BAD_MESSAGE = "too_large", "bad_message"
# A message that lost its connection this often may be the cause.
BREAKS = 2


@dataclass(slots=True, eq=False)
class PendingMessage:
    """One message of a call, for the routing key or subject `name`. `breaks`: how many connections broke under it."""

    delivery: Delivery
    name: str
    started: float
    outcome: Outcome | None = None
    breaks: int = 0

    @property
    def duration_ms(self) -> int:
        """Milliseconds since its call began."""
        return round((perf_counter() - self.started) * 1000)

    def done(self) -> None:
        """Set the outcome: the broker acknowledged the message."""
        self.outcome = Delivered(None, self.duration_ms)

    def fail(self, error: str, *, unreachable: bool = False) -> None:
        """Set the outcome: a failure that is retried."""
        self.outcome = Failed(error, None, None, None, self.duration_ms, unreachable)

    def refuse(self, reason: str, error: str, *, asked: bool = False) -> None:
        """Set the outcome: the broker never takes this message. `asked`: whether the broker itself said so."""
        self.outcome = Refused(reason, error, None, None, self.duration_ms, asked)

    def broken(self, error: str) -> None:
        """Count a broken connection; fail the message at the BREAKS-th."""
        self.breaks += 1
        if self.breaks >= BREAKS:
            self.fail(f"the connection broke before the broker acknowledged: {error}")


class BrokerConnection(Protocol):
    """A connection. `last_answer_at`: the time of the broker's last answer, by the event loop's clock."""

    last_answer_at: float

    @property
    def open(self) -> bool:
        """Whether the connection is usable as far as the client knows."""

    def drop(self) -> None:
        """Close the socket at once and drop its unwritten bytes."""

    async def close(self) -> None:
        """Close in order unless dropped, and end the client's tasks. Never raises."""


C = TypeVar("C", bound=BrokerConnection)


class BrokerConnections(Generic[C]):
    """The current connection of a destination. `errors`: the errors of `connect` and `once` besides OSError."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[C]],
        once: Callable[[C, Sequence[PendingMessage]], Awaitable[None]],
        errors: tuple[type[Exception], ...],
        timeout_s: float,
    ) -> None:
        self._connect, self._once, self._timeout_s = connect, once, timeout_s
        self._errors: tuple[type[Exception], ...] = (OSError, *errors)
        self._turn = asyncio.Lock()
        self._connection: C | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def send(self, messages: Sequence[PendingMessage]) -> list[Outcome]:
        """Send messages by `once` until each has an outcome or the time is over; return all outcomes."""
        connection: C | None = None
        error = ""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                while waiting := [message for message in messages if message.outcome is None]:
                    connection = None
                    connection = await self._current()
                    await self._attempt(connection, waiting)
        except self._errors as failure:
            # TimeoutError is an OSError, and a failed connect may raise one as well.
            awaited = "connection" if connection is None else "acknowledgement"
            error = f"no {awaited} within {self._timeout_s:g} s" if limit.expired() else error_text(failure)
        for message in messages:
            if message.outcome is None:
                message.fail(error, unreachable=connection is None)
        return [message.outcome for message in messages if message.outcome is not None]

    def drop(self, connection: C) -> None:
        """Close this connection in the background; the next call makes another."""
        if self._connection is connection:
            self._connection = None
            connection.drop()
            ending = asyncio.create_task(connection.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close the connection, and wait for connections that are closing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        await asyncio.gather(*self._ending)

    async def _current(self) -> C:
        if self._connection is None or not self._connection.open:
            async with self._turn:
                if self._connection is not None and not self._connection.open:
                    self.drop(self._connection)
                if self._connection is None:
                    self._connection = await self._connect()
        return self._connection

    async def _attempt(self, connection: C, waiting: Sequence[PendingMessage]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._once(connection, waiting)
        except asyncio.CancelledError:
            if current_task_cancelled():
                if connection.last_answer_at < began:
                    # No answer during the whole attempt: unwritten bytes must not be sent later.
                    self.drop(connection)
                raise
            # The client cancelled its own callers: it received no heartbeats.
            self._broken(connection, waiting, "the connection was closed")
        except self._errors as failure:
            self._broken(connection, waiting, error_text(failure))

    def _broken(self, connection: C, waiting: Sequence[PendingMessage], error: str) -> None:
        self.drop(connection)
        for message in waiting:
            if message.outcome is None:
                message.broken(error)


def error_text(error: BaseException) -> str:
    """Return an error's text for people."""
    return str(error) or type(error).__name__
