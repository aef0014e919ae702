"""Resolve host names, so that names whose servers do not answer do not hold up the others.

A lookup of the C library blocks a thread, takes 10 s and more for a name whose server does not answer, and cannot be
canceled. uvloop runs at most two at once for the whole process. So lookups have threads of their own here, and names
that are not known to answer quickly may take only a share of them. A name that was quick and becomes slow leaves its
place to another name while its thread waits.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import inf
from threading import Thread
from time import monotonic
from typing import Any, TypeAlias

# Takes a host name; returns numeric addresses in the order to try them. Raises OSError, or ValueError if it is no name.
Lookup: TypeAlias = Callable[[str], Awaitable[Sequence[str]]]

# Addresses of a name are used again for this time.
LOOKUP_S = 10.0
# A name is not looked up again for this time after a lookup that failed.
FAILED_S = 1.0
# Lookups that run at once, each in a thread, besides those that last.
LOOKUPS_MAX = 32
# Those of names that were never looked up or were slow, and those of names that were slow: the rest is for the others.
UNPROVEN_MAX = 24
SLOW_MAX = 16
# A lookup is slow from this time on. The C library asks again, or the next server, after 5 s.
SLOW_S = 2.0
# Lookups of quick names that became slow and left their places to others: as many more threads. One that waits takes
# about 25 kB, and all names of one provider become slow at once.
LASTING_MAX = 224
# Names of which a process remembers whether the last lookup was slow.
NAMES_MAX = 10_000


class NoAddress(OSError):
    """A name has no address, or the name servers do not say one; the text names it and says why."""


@dataclass(slots=True, eq=False)
class _Known:
    """A lookup of a name. `until`: the time until which its result is used again, once it has ended."""

    lookup: asyncio.Task[Sequence[str] | NoAddress] = field(init=False)
    until: float = -inf
    has_failed: bool = False

    def counts(self, now: float, *, fresh: bool = False) -> bool:
        """Return whether a caller takes its result."""
        return not self.lookup.done() or (now < self.until and (self.has_failed or not fresh))


class Resolver:
    """Resolves names by `lookup`. A name has at most one lookup at a time, and concurrent callers share it."""

    def __init__(
        self,
        lookup: Lookup,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lookup, self._clock, self._sleep = lookup, clock, sleep
        self._known: dict[str, _Known] = {}
        # Whether the last lookup of a name was slow, by the age of that lookup.
        self._was_slow: dict[str, bool] = {}
        self._all, self._unproven, self._slow = map(asyncio.Semaphore, (LOOKUPS_MAX, UNPROVEN_MAX, SLOW_MAX))
        self._lasting = asyncio.Semaphore(LASTING_MAX)

    async def addresses(self, host: str, *, fresh: bool = False) -> Sequence[str]:
        """Return the addresses of a host; a numeric address is its own. Raises NoAddress.

        `fresh`: addresses of an earlier lookup do not count. The failure of one still does.
        """
        if _is_address(host):
            return [host]
        known = self._known.get(host)
        if known is None or not known.counts(self._clock(), fresh=fresh):
            known = self._begin(host)
        # A caller that gives up must not end the lookup for the others.
        found = await asyncio.shield(known.lookup)
        if isinstance(found, NoAddress):
            raise NoAddress(str(found))
        return found

    def _begin(self, host: str) -> _Known:
        now = self._clock()
        for old in [name for name, known in self._known.items() if not known.counts(now)]:
            del self._known[old]
        known = self._known[host] = _Known()
        known.lookup = asyncio.create_task(self._look_up(host, known))
        return known

    async def _look_up(self, host: str, known: _Known) -> Sequence[str] | NoAddress:
        found: Sequence[str] | NoAddress
        async with AsyncExitStack() as places:
            # Always in the same order, so that no lookup waits for one that waits for it.
            for share in self._shares(host):
                await places.enter_async_context(share)
            began = self._clock()
            leaving = asyncio.create_task(self._leave(places)) if self._was_slow.get(host) is False else None
            try:
                found = await self._lookup(host)
            except OSError as error:
                found = NoAddress(f"no address of {host}: {error.strerror or error}")
            except ValueError:
                found = NoAddress(f"no address of {host}: it is not a host name")
            finally:
                if leaving is not None:
                    leaving.cancel()
        now = self._clock()
        known.has_failed = isinstance(found, NoAddress)
        known.until = now + (FAILED_S if known.has_failed else LOOKUP_S)
        self._remember(host, was_slow=now - began >= SLOW_S)
        return found

    async def _leave(self, places: AsyncExitStack) -> None:
        """Leave the places of a lookup to others once it is slow and may be one of those that last."""
        await self._sleep(SLOW_S)
        await self._lasting.acquire()
        # Neither waits, so the end of the lookup comes before or after both.
        await places.aclose()
        places.callback(self._lasting.release)

    def _shares(self, host: str) -> Sequence[asyncio.Semaphore]:
        """Return what limits the lookups of a name, by its last one."""
        match self._was_slow.get(host):
            case None:
                return self._unproven, self._all
            case True:
                return self._slow, self._unproven, self._all
            case False:
                return (self._all,)

    def _remember(self, host: str, *, was_slow: bool) -> None:
        self._was_slow.pop(host, None)
        self._was_slow[host] = was_slow
        if len(self._was_slow) > NAMES_MAX:
            del self._was_slow[next(iter(self._was_slow))]


async def system_addresses(host: str) -> Sequence[str]:
    """Return a host's addresses by the system's resolver, in a thread. Raises OSError, and ValueError if it is no name.

    The thread is a daemon: unlike threads of an executor or of uvloop, it does not delay the end of the process.
    """
    answer: Future[list[Any]] = Future()
    # A caller that gives up must not change the state of a future that the thread will set.
    answer.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            answer.set_result(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        except Exception as error:
            answer.set_exception(error)

    try:
        Thread(target=look_up, name="lookup", daemon=True).start()
    except RuntimeError as error:
        raise OSError(f"no thread could be started: {error}") from error
    found = await asyncio.wrap_future(answer)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
