"""Names whose servers do not answer hold up neither other names nor the end of a process."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable

import pytest

from app.egress.resolver import (
    FAILED_S,
    LASTING_MAX,
    LOOKUP_S,
    LOOKUPS_MAX,
    SLOW_MAX,
    SLOW_S,
    UNPROVEN_MAX,
    NoAddress,
    Resolver,
    system_addresses,
)
from tests.support.network_namespace import PUBLIC
from tests.support.processes import ROOT
from tests.support.requirements import absent

UNSHARE = shutil.which("unshare")
FOUND = ["192.0.2.1"]


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_names_whose_servers_do_not_answer_do_not_hold_up_others(loop: str) -> None:
    inside = [UNSHARE or "", "-Urnm"]
    if UNSHARE is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        absent("no namespaces of users, networks and mounts here: `unshare -Urnm true` fails", "MACHINE")
    command = [*inside, sys.executable, "-m", "tests.support.silent_names", loop]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert completed.returncode == 0, completed.stderr
    seen = json.loads(completed.stdout)
    assert {**seen, "silent": 0} == {
        # The names that answer, while no call to a silent name was over.
        **{"new": 204, "known": [PUBLIC], "ended": 0},
        # One question for a name, and the process ended while lookups waited for answers.
        **{"most": 1, "status": 0, "silent": 0},
    }
    assert seen["silent"] <= UNPROVEN_MAX
    assert "never retrieved" not in completed.stderr


class Lookups:
    """Lookups of a resolver that end when a test says so, and the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.began: Counter[str] = Counter()
        self._running: dict[str, asyncio.Future[list[str]]] = {}
        self._sleeping: list[tuple[float, asyncio.Future[None]]] = []
        self.resolver = Resolver(self.look_up, lambda: self.now, self.sleep)

    async def look_up(self, host: str) -> list[str]:
        """Wait for the end of this lookup."""
        self.began[host] += 1
        running: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._running[host] = running
        return await running

    async def sleep(self, seconds: float) -> None:
        """Sleep until this time has passed on the clock of the test."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleeping.append((self.now + seconds, woken))
        await woken

    async def let_pass(self, seconds: float) -> None:
        """Move the clock, and let run what slept until then."""
        self.now += seconds
        for until, woken in self._sleeping:
            if until <= self.now and not woken.done():
                woken.set_result(None)
        await self.settle()

    async def begin(self, *hosts: str, fresh: bool = False) -> list[asyncio.Task[list[str]]]:
        """Ask for these names, and let their lookups begin."""
        asked = [asyncio.create_task(self._addresses(host, fresh)) for host in hosts]
        await self.settle()
        return asked

    async def end(self, *hosts: str, error: OSError | None = None) -> None:
        """End the lookups of these names."""
        for host in hosts:
            running = self._running.pop(host)
            if error is None:
                running.set_result(FOUND)
            else:
                running.set_exception(error)
        await self.settle()

    async def prove(self, hosts: Iterable[str], *, took_s: float) -> None:
        """Let the lookup of each name take this time, and what it found expire."""
        for host in hosts:
            asked = await self.begin(host)
            await self.let_pass(took_s)
            await self.end(host)
            await asyncio.gather(*asked)
        self.now += LOOKUP_S

    def running(self) -> set[str]:
        """Return the names that are looked up now."""
        return set(self._running)

    async def settle(self) -> None:
        """Let all tasks run until each waits."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def _addresses(self, host: str, fresh: bool) -> list[str]:
        return list(await self.resolver.addresses(host, fresh=fresh))


def names(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}.test" for number in range(count)]


async def test_a_name_has_one_lookup_at_a_time_however_long_it_takes() -> None:
    lookups = Lookups()
    asked = await lookups.begin("shop.test", "shop.test")
    asked[0].cancel()
    lookups.now += 10 * LOOKUP_S
    asked += await lookups.begin("shop.test")
    asked += await lookups.begin("shop.test", fresh=True)
    assert lookups.began == {"shop.test": 1}
    await lookups.end("shop.test")
    assert await asyncio.gather(*asked[1:]) == [FOUND] * 3


async def test_addresses_are_used_again_for_a_time_except_by_brokers() -> None:
    lookups = Lookups()
    await lookups.begin("shop.test")
    lookups.now += 5
    await lookups.end("shop.test")
    lookups.now += LOOKUP_S - 0.1
    [again] = await lookups.begin("shop.test")
    assert await again == FOUND
    assert lookups.began["shop.test"] == 1
    await lookups.begin("shop.test", fresh=True)
    assert lookups.began["shop.test"] == 2
    await lookups.end("shop.test")
    lookups.now += LOOKUP_S
    await lookups.begin("shop.test")
    assert lookups.began["shop.test"] == 3
    await lookups.end("shop.test")


async def test_a_failure_is_remembered_for_a_moment() -> None:
    lookups = Lookups()
    asked = await lookups.begin("shop.test", "shop.test")
    await lookups.end("shop.test", error=OSError("the name server is away"))
    lookups.now += FAILED_S - 0.1
    asked += await lookups.begin("shop.test")
    asked += await lookups.begin("shop.test", fresh=True)
    for each in asked:
        with pytest.raises(NoAddress, match=r"^no address of shop\.test: the name server is away$"):
            await each
    assert lookups.began["shop.test"] == 1
    lookups.now += 0.1
    [answered] = await lookups.begin("shop.test")
    await lookups.end("shop.test")
    assert await answered == FOUND


async def test_a_lookup_that_all_callers_left_fails_without_a_word() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    lookups = Lookups()
    [asked] = await lookups.begin("shop.test")
    asked.cancel()
    await lookups.end("shop.test", error=OSError("the name server is away"))
    lookups.now += LOOKUP_S
    await lookups.prove(["other.test"], took_s=0)
    assert told == []


async def test_names_that_were_slow_take_a_share_and_new_names_another() -> None:
    lookups = Lookups()
    await lookups.prove(names("slow", SLOW_MAX + 1), took_s=SLOW_S)
    await lookups.prove(names("quick", LOOKUPS_MAX), took_s=SLOW_S / 2)
    asked = await lookups.begin(*names("slow", SLOW_MAX + 1))
    assert lookups.running() == set(names("slow", SLOW_MAX))
    asked += await lookups.begin(*names("new", UNPROVEN_MAX))
    new_ones = set(names("new", UNPROVEN_MAX - SLOW_MAX))
    assert lookups.running() == {*names("slow", SLOW_MAX), *new_ones}
    asked += await lookups.begin(*names("quick", LOOKUPS_MAX))
    quick_ones = set(names("quick", LOOKUPS_MAX - UNPROVEN_MAX))
    assert lookups.running() == {*names("slow", SLOW_MAX), *new_ones, *quick_ones}
    # What waits comes to its turn, and a name that answers quickly is no longer slow.
    while lookups.running():
        await lookups.end(*lookups.running())
    assert await asyncio.gather(*asked) == [FOUND] * len(asked)
    lookups.now += LOOKUP_S
    asked = await lookups.begin(*names("slow", SLOW_MAX + 1))
    assert len(lookups.running()) == SLOW_MAX + 1
    await lookups.end(*lookups.running())
    await asyncio.gather(*asked)


async def test_names_that_become_slow_leave_their_places_to_others() -> None:
    """Else the names of one provider whose servers fail would take all places for as long as their lookups last."""
    lookups = Lookups()
    most = LOOKUPS_MAX + LASTING_MAX
    failing, others = names("failing", most + 1), names("other", 2)
    await lookups.prove([*failing, *others], took_s=0)
    asked = await lookups.begin(*failing[:LOOKUPS_MAX], others[0])
    assert lookups.running() == set(failing[:LOOKUPS_MAX])
    await lookups.let_pass(SLOW_S)
    assert lookups.running() == {*failing[:LOOKUPS_MAX], others[0]}
    await lookups.end(others[0])
    # The lookups that last are limited, and so are all of them.
    asked += await lookups.begin(*failing[LOOKUPS_MAX:], others[1])
    for _ in range(most):
        await lookups.let_pass(SLOW_S)
    assert lookups.running() == set(failing[:most])
    # One that ends makes room among those that last.
    await lookups.end(failing[0])
    assert lookups.running() == set(failing[1:])
    await lookups.end(failing[1])
    assert others[1] in lookups.running()
    while lookups.running():
        await lookups.end(*lookups.running())
    assert await asyncio.gather(*asked) == [FOUND] * len(asked)
    # Now they are known to be slow, and no place is lost.
    lookups.now += LOOKUP_S
    await lookups.prove(names("quick", LOOKUPS_MAX), took_s=0)
    asked = await lookups.begin(*failing[:most], *names("quick", LOOKUPS_MAX))
    assert lookups.running() == {*failing[:SLOW_MAX], *names("quick", LOOKUPS_MAX - SLOW_MAX)}
    while lookups.running():
        await lookups.end(*lookups.running())
    await asyncio.gather(*asked)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
async def test_an_address_needs_no_lookup(address: str) -> None:
    lookups = Lookups()
    assert await lookups.resolver.addresses(address) == [address]
    assert not lookups.began


@pytest.mark.parametrize("host", ["a..test", f"{'a' * 64}.test"])
async def test_what_is_no_host_name_has_no_address(host: str) -> None:
    with pytest.raises(NoAddress, match="it is not a host name"):
        await Resolver(system_addresses).addresses(host)


async def test_the_system_resolves_the_name_of_this_machine() -> None:
    assert set(await system_addresses("localhost")) & {"127.0.0.1", "::1"}
