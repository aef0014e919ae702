"""What a driver measures in one slice of load, and the protocol of drivers that run as processes of their own."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from bench.services import cpu_s

START_S = 240.0
# A server's files are deleted after its end, so an end in order does not matter.
STOP_S = 3.0
# A paced slice of 1,500/s for some seconds is one line with a number for each message.
LINE_BYTES = 2**24
# How much longer than planned a paced slice may take until its last delivery: a share and a fixed part.
HELD_SHARE, HELD_S = 1.1, 0.5


class BrokenSliceError(Exception):
    """A slice without useful figures."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The load of one slice: `size` callers at once, or a rate, for `seconds`; `within_s` for the last deliveries."""

    kind: str
    size: int
    seconds: float
    within_s: float

    def line(self) -> str:
        """Return the line for a driver's stdin."""
        return f"{self.kind} {self.size} {self.seconds} {self.within_s}\n"


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of a slice. `seconds` is from the first request to the last delivery, `late_us` of a paced slice."""

    sent: int
    delivered: int
    repeated: int
    failed: int
    seconds: float
    late_us: Sequence[int] = field(default=())

    @property
    def rate(self) -> float:
        """Delivered transactions per second."""
        return self.delivered / self.seconds

    def whole(self) -> bool:
        """Return whether each transaction was answered and its message delivered."""
        return self.failed == 0 and self.delivered == self.sent

    def held(self, planned_s: float) -> bool:
        """Return whether the system kept up with a paced slice that was planned to take so long."""
        return self.whole() and self.seconds <= planned_s * HELD_SHARE + HELD_S


@dataclass(frozen=True, slots=True)
class Measured:
    """A slice with its cost: CPU seconds of the system's servers, of their database, and of clients and receivers."""

    sent: Sent
    service_s: float
    database_s: float
    client_s: float

    @property
    def service_us(self) -> float:
        """CPU µs of the servers per delivered transaction."""
        return self.service_s / self.sent.delivered * 1e6

    @property
    def database_us(self) -> float:
        """CPU µs of the database per delivered transaction."""
        return self.database_s / self.sent.delivered * 1e6

    @property
    def client_us(self) -> float:
        """CPU µs of clients and receivers per delivered transaction."""
        return self.client_s / self.sent.delivered * 1e6


class Driver(Protocol):
    """Sends transactions and counts their messages."""

    async def send(self, load: Slice) -> Sent:
        """Run one slice."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """A running system with its driver. `halted` are the processes that are stopped while others are measured."""

    name: str
    driver: Driver
    service_cpu_s: Callable[[], float]
    database_cpu_s: Callable[[], float]
    client_cpu_s: Callable[[], float]
    halted: Callable[[], list[psutil.Process]]

    async def measure(self, load: Slice) -> Measured:
        """Run one slice and measure its cost. Raises BrokenSliceError if nothing was delivered."""
        parts = (self.service_cpu_s, self.database_cpu_s, self.client_cpu_s)
        before = [part() for part in parts]
        sent = await self.driver.send(load)
        used = [part() - begun for part, begun in zip(parts, before, strict=True)]
        if sent.delivered == 0 or sent.seconds <= 0:
            raise BrokenSliceError(f"{self.name}: nothing of {sent.sent:,} transactions was delivered")
        return Measured(sent, *used)

    def halt(self) -> None:
        """Stop the system's processes with SIGSTOP, so that they take no CPU time."""
        with suppress(psutil.NoSuchProcess):
            for process in self.halted():
                process.suspend()

    def resume(self) -> None:
        """Let the processes run again, the servers before the drivers."""
        with suppress(psutil.NoSuchProcess):
            for process in self.halted():
                process.resume()


def cpu_of(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds so far of some processes."""
    return sum(cpu_s(process) for process in processes)


class ProcessDriver:
    """A driver that runs as a process of its own: a line on stdin for each slice, a line of JSON as the answer."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self._name, self._process, self._log = name, process, log

    @property
    def process(self) -> psutil.Process:
        """The process, to stop it while others are measured."""
        return psutil.Process(self._process.pid)

    async def send(self, load: Slice) -> Sent:
        """Run one slice. Raises BrokenSliceError if the driver ends or does not answer."""
        # The longest wait of the drivers for answers of paced requests is a minute.
        return Sent(**json.loads(await self.ask(load.line(), load.seconds + load.within_s + 90)))

    async def ask(self, line: str, within_s: float) -> bytes:
        """Send a line and return the line of the answer. Raises BrokenSliceError as `send` does."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        return await self._line(within_s)

    async def read(self, size: int) -> bytes:
        """Return bytes that follow the line of an answer."""
        assert self._process.stdout is not None
        return await self._process.stdout.readexactly(size)

    def messages(self) -> str:
        """Return the end of the driver's log."""
        return tail(self._log)

    async def ready(self) -> None:
        """Wait until the driver is connected."""
        await self._line(START_S)

    async def _line(self, within_s: float) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise BrokenSliceError(f"{self._name}'s driver did not answer within {within_s:g} s") from None
        if not line:
            raise BrokenSliceError(f"{self._name}'s driver ended:\n{tail(self._log)}")
        return line


@asynccontextmanager
async def driving(name: str, log: Path, *command: str) -> AsyncIterator[ProcessDriver]:
    """Run a driver until the block ends."""
    with log.open("wb") as messages:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=messages,
            limit=LINE_BYTES,
            start_new_session=True,
        )
    try:
        driver = ProcessDriver(name, process, log)
        await driver.ready()
        yield driver
    finally:
        await ended(process)


@asynccontextmanager
async def server(log: Path, *command: str, **options: Any) -> AsyncIterator[psutil.Process]:
    """Run a server until the block ends; its messages go to `log`."""
    with log.open("wb") as messages:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=messages, stderr=messages, start_new_session=True, **options
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        await ended(process)


async def ended(process: asyncio.subprocess.Process) -> None:
    """End a process that may be stopped with SIGSTOP: with SIGTERM, then with SIGKILL."""
    if process.returncode is not None:
        return
    # It may end by itself at any time.
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def listening(port: int, process: psutil.Process, log: Path) -> None:
    """Wait until a server listens on a port. Raises BrokenSliceError with the end of its log if it does not."""
    try:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                        raise BrokenSliceError(f"a server ended at startup:\n{tail(log)}") from None
                    await asyncio.sleep(0.1)
                else:
                    writer.close()
                    return
    except TimeoutError:
        raise BrokenSliceError(f"a server did not start within {START_S:g} s:\n{tail(log)}") from None


def tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-800:]
