"""Record when each message reaches a subscriber: compile and run a receiver in C (arrivals.c), and read its log."""

import asyncio
import shutil
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx

from bench.services import ROOT, Service, printing_port
from bench.wrk import BrokenRunError

# The format of `struct arrival` in arrivals.c.
RECORD = struct.Struct("=qII40s")
LOOK_EVERY_S = 0.1
# How long to wait for messages that arrive a second time.
AFTER_S = 0.3

MISSING = (
    "The relay's receiver is a C program, and the C compiler `cc` is missing. On Debian and Ubuntu: apt install gcc."
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request at the receiver: its time (`clock_gettime(CLOCK_MONOTONIC)`), subscription and number of messages."""

    at_s: float
    subscription: int
    messages: int
    transaction_id: str


def require_cc() -> None:
    """Raise SystemExit with the way to install a C compiler, if there is none."""
    if shutil.which("cc") is None:
        raise SystemExit(MISSING)


@asynccontextmanager
async def noting(place: Path) -> AsyncIterator[Service]:
    """Compile the receiver into the directory `place` and run it."""
    async with printing_port(str(await compiled("arrivals", place))) as service:
        yield service


async def compiled(name: str, place: Path) -> Path:
    """Compile the C program `name` of this directory into the directory `place`, once, and return its path."""
    program, source = (place / name).resolve(), ROOT / "bench" / f"{name}.c"
    if not program.exists():
        compiling = await asyncio.create_subprocess_exec("cc", "-O2", "-o", str(program), str(source))
        if await compiling.wait():
            raise RuntimeError(f"{source} does not compile")
    return program


async def take(receiver: Service) -> list[Arrival]:
    """Return the arrivals since the last call, in order, and empty the log."""
    return parsed(await _get(receiver, "/log"))


def parsed(log: bytes) -> list[Arrival]:
    """Return the arrivals in a log."""
    return [
        Arrival(ns / 1e9, subscription, messages, name.partition(b"\x00")[0].decode("ascii", "replace"))
        for ns, subscription, messages, name in RECORD.iter_unpack(log)
    ]


async def sample(receiver: Service) -> tuple[dict[str, str], bytes]:
    """Return headers and body of the last request, without the headers that every HTTP client adds itself."""
    head, _, body = (await _get(receiver, "/sample")).partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode("ascii").split("\r\n")[1:])
    own = ("host", "content-length", "connection", "accept")
    return {name: value for name, value in headers.items() if name.lower() not in own}, body


async def came(receiver: Service, count: int, within_s: float, watch: Sequence[Service] = ()) -> list[Arrival]:
    """Wait until `count` messages arrive and return their arrivals. The services in `watch` must keep running.

    Raises BrokenRunError if the messages do not arrive in time, or more arrive.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + within_s
    async with httpx.AsyncClient(base_url=receiver.url, trust_env=False) as client:
        while (so_far := int((await client.get("/count")).text)) < count:
            if loop.time() > until or not all(service.root.is_running() for service in watch):
                raise BrokenRunError(f"{so_far:,} of {count:,} messages arrived within {within_s:g} s")
            await asyncio.sleep(LOOK_EVERY_S)
    await asyncio.sleep(AFTER_S)
    arrivals = await take(receiver)
    if (total := sum(arrival.messages for arrival in arrivals)) != count:
        again = Counter((arrival.subscription, arrival.transaction_id) for arrival in arrivals)
        whose = Counter(subscription for (subscription, _), times in again.items() if times > 1)
        repeated = f"repeated messages by subscription: {dict(whose)}"
        raise BrokenRunError(f"{total:,} messages arrived, and {count:,} were sent; {repeated}")
    return arrivals


def rate(arrivals: Sequence[Arrival]) -> float:
    """Return messages per second from the first arrival, which does not count, to the last one."""
    return messages_of(arrivals) / (arrivals[-1].at_s - arrivals[0].at_s)


def messages_of(arrivals: Sequence[Arrival]) -> int:
    """Return how many messages arrived after the first arrival."""
    return sum(arrival.messages for arrival in arrivals) - arrivals[0].messages


def parts_of(arrivals: Sequence[Arrival], parts: int) -> list[Sequence[Arrival]]:
    """Return the arrivals in `parts` equal parts, each starting with the last arrival of the previous part."""
    bounds = [(len(arrivals) - 1) * part // parts for part in range(parts + 1)]
    return [arrivals[low : high + 1] for low, high in pairwise(bounds)]


def rates_in_windows(times_s: Sequence[float], window_s: float, step_s: float = 0.1) -> list[float]:
    """Return the rate over each window that lies fully within the run; a window starts every `step_s`."""
    begins, found, low, high = times_s[0], [], 0, 0
    while begins + window_s <= times_s[-1]:
        while times_s[low] < begins:
            low += 1
        while times_s[high] < begins + window_s:
            high += 1
        found.append((high - low) / window_s)
        begins += step_s
    return found


def now_s() -> float:
    """Return the time on the receiver's clock; `time.monotonic` uses another clock on some systems."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


async def _get(receiver: Service, path: str) -> bytes:
    async with httpx.AsyncClient(base_url=receiver.url, trust_env=False, timeout=60) as client:
        return (await client.get(path)).content
