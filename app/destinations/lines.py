"""One connection for all calls of a destination: made when one is needed, dropped when it broke or fell silent.

A call sends its messages, and again those whose connection broke or that a neighbour's fault kept from being judged,
until each has an outcome or the time is over. So an outcome always comes within `timeout_s`.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from app.destinations.base import Delivered, Delivery, Failed, Outcome, Refused

TOO_LARGE, BAD_MESSAGE = "too_large", "bad_message"
# A message whose connection broke twice under it may be the cause.
BREAKS = 2


@dataclass(slots=True, eq=False)
class Sending:
    """One message of a call, on its way to the routing key or subject `name`. `breaks`: connections lost under it."""

    delivery: Delivery
    name: str
    started: float
    outcome: Outcome | None = None
    breaks: int = 0

    @property
    def duration_ms(self) -> int:
        """How long its call has taken."""
        return round((perf_counter() - self.started) * 1000)

    def done(self) -> None:
        """The broker has it."""
        self.outcome = Delivered(None, self.duration_ms)

    def fail(self, error: str, *, unreachable: bool = False) -> None:
        """Set the outcome."""
        self.outcome = Failed(error, None, None, None, self.duration_ms, unreachable)

    def refuse(self, reason: str, error: str) -> None:
        """Set the outcome of one that the broker will never take."""
        self.outcome = Refused(reason, error, None, None, self.duration_ms)

    def broken(self, error: str) -> None:
        """Note that the connection broke: it goes again, but not for ever."""
        self.breaks += 1
        if self.breaks >= BREAKS:
            self.fail(f"the connection broke before the broker acknowledged: {error}")


class Line(Protocol):
    """A connection. `heard_at`: when the broker answered a message last, by the loop's time."""

    heard_at: float

    @property
    def open(self) -> bool:
        """Whether it is of use, as far as is known."""

    def drop(self) -> None:
        """Let go of the socket at once, whatever is still to be written to it."""

    async def close(self) -> None:
        """End all that belongs to it, politely if it was not dropped. Never raises."""


L = TypeVar("L", bound=Line)


class Lines(Generic[L]):
    """The one connection of a destination at a time. `errors`: what `connect` and `once` raise beside OSError."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[L]],
        once: Callable[[L, Sequence[Sending]], Awaitable[None]],
        errors: tuple[type[Exception], ...],
        timeout_s: float,
    ) -> None:
        self._connect, self._once, self._timeout_s = connect, once, timeout_s
        self._errors: tuple[type[Exception], ...] = (OSError, *errors)
        self._turn = asyncio.Lock()
        self._line: L | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def send(self, sendings: Sequence[Sending]) -> list[Outcome]:
        """Send what has no outcome yet by `once`, again and again if it must be, and return all outcomes."""
        line: L | None = None
        error = ""
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                while waiting := [sending for sending in sendings if sending.outcome is None]:
                    line = None
                    line = await self._current()
                    await self._attempt(line, waiting)
        except self._errors as failure:
            # OSError is TimeoutError's parent, and a failed connect may be one as well.
            awaited = "connection" if line is None else "acknowledgement"
            error = f"no {awaited} within {self._timeout_s:g} s" if limit.expired() else told(failure)
        for sending in sendings:
            if sending.outcome is None:
                sending.fail(error, unreachable=line is None)
        return [sending.outcome for sending in sendings if sending.outcome is not None]

    def drop(self, line: L) -> None:
        """Use another connection from now on."""
        if self._line is line:
            self._line = None
            line.drop()
            ending = asyncio.create_task(line.close())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """Close the connection, and wait for those that are closing."""
        line, self._line = self._line, None
        if line is not None:
            await line.close()
        await asyncio.gather(*self._ending)

    async def _current(self) -> L:
        if self._line is None or not self._line.open:
            async with self._turn:
                if self._line is not None and not self._line.open:
                    self.drop(self._line)
                if self._line is None:
                    self._line = await self._connect()
        return self._line

    async def _attempt(self, line: L, waiting: Sequence[Sending]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await self._once(line, waiting)
        except asyncio.CancelledError:
            if line.heard_at < began:
                # Not a word all the time: what is still to be written must not go out later.
                self.drop(line)
            raise
        except self._errors as failure:
            self.drop(line)
            for sending in waiting:
                if sending.outcome is None:
                    sending.broken(told(failure))


def told(error: BaseException) -> str:
    """Return an error as a person may read it."""
    return str(error) or type(error).__name__
