"""The producers in Go, Java and Node of examples/, against the real service and a separate Postgres.

The check comes before, during and after the local database transaction: what the producer's database holds and the
verdict that Halfnote has recorded are the same, always.
"""

import asyncio
import random
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psycopg
import pytest
from aiohttp import web
from halfnote.barrier_sql import BarrierSql
from halfnote.testing import signed_check, signed_ping

from tests.support import postgres
from tests.support.processes import ROOT, Service
from tests.support.producers import DRIVER, EXAMPLES, LANGUAGES, SECRET, Between, Language, Producer, require

RACES = 300
WITHIN_S = 120.0
# Backends that wait for another database transaction.
WAITING = """
select count(*) from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and pid <> pg_backend_pid()
"""

pytestmark = pytest.mark.timeout(900)


@dataclass
class Stage:
    """A producer, the proxy between it and Halfnote, and the records of both."""

    producer: Producer
    between: Between
    halfnote: httpx.AsyncClient
    shop: psycopg.Connection

    async def place(self, number: int) -> str:
        """Place an order; return the producer's answer."""
        async with httpx.AsyncClient(timeout=WITHIN_S) as caller:
            came = await caller.post(f"{self.producer.url}/orders/{number}")
        assert came.status_code == 200, came.text
        return came.text

    async def ask(self, transaction_id: str) -> None:
        """Make Halfnote check now, unless the transaction is decided."""
        came = await self.halfnote.post(f"/transactions/{transaction_id}/check")
        assert came.status_code in (200, 202, 409), came.text

    async def verdict(self, transaction_id: str) -> dict[str, Any]:
        """Return the verdict that is recorded, once it is."""
        found: dict[str, Any] = {}

        async def decided() -> bool:
            nonlocal found
            found = (await self.halfnote.get(f"/transactions/{transaction_id}")).json().get("verdict") or {}
            return bool(found)

        await until(decided)
        return found

    async def checked(self, transaction_id: str) -> None:
        """Have it checked, and wait until it is decided."""
        await self.ask(transaction_id)
        await self.verdict(transaction_id)

    def orders(self) -> list[int]:
        """Return the orders that the producer has kept."""
        return [row[0] for row in self.shop.execute("select number from orders order by number").fetchall()]

    async def waiting(self, count: int) -> None:
        """Wait until so many of the producer's database transactions wait for another one."""

        async def waits() -> bool:
            found = self.shop.execute(WAITING).fetchone()
            return found is not None and found[0] >= count

        await until(waits)


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await reached():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def staged(language: Language, data_dir: Path, dsn: str, place: Path) -> AsyncIterator[Stage]:
    database = postgres.create_database()
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    producer = None
    try:
        async with Between(service.url) as between, httpx.AsyncClient(base_url=service.url, timeout=60) as halfnote:
            with closing(psycopg.connect(database, autocommit=True)) as shop:
                shop.execute("create table orders (number int primary key)")
                shop.execute(BarrierSql("postgresql", "halfnote_barrier", 3).create.encode())
                producer = Producer(language, place, between.url, database)
                await started(producer)
                group = {"check_urls": [f"{producer.url}/halfnote/check"], "secret": SECRET}
                assert (await halfnote.put("/producer-groups/shop", json=group)).status_code == 201
                yield Stage(producer, between, halfnote, shop)
    finally:
        if producer is not None:
            producer.kill()
        service.stop()
        postgres.drop_database(database)


async def started(producer: Producer) -> None:
    """Start a producer and wait until it answers a ping."""
    producer.start()
    async with httpx.AsyncClient() as client:

        async def answers() -> bool:
            headers, body = signed_ping("shop", secret=SECRET)
            try:
                came = await client.post(f"{producer.url}/halfnote/check", headers=headers, content=body)
            except httpx.TransportError:
                return not producer.alive()
            return came.status_code in (200, 204)

        await until(answers)


@pytest.fixture(params=LANGUAGES)
async def stage(request: pytest.FixtureRequest, data_dir: Path, dsn: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(require(request.param), data_dir, dsn, tmp_path) as stage:
        yield stage


async def kept_and_announced(stage: Stage, number: int) -> None:
    told = await stage.place(number)
    [(transaction_id, sent)] = stage.between.halves.items()
    assert sent == number
    assert told.split()[:2] == [transaction_id, "commit"]
    verdict = await stage.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("commit", "producer")
    assert number in stage.orders()
    # The same order once more is refused by the shop's own database.
    assert (await stage.place(number)).split()[1] == "rollback"
    _, again = stage.between.halves
    assert (await stage.verdict(again))["verdict"] == "rollback"


async def checked_before(stage: Stage, number: int) -> None:
    """A check before the local database transaction prevents it."""
    stage.between.after_half = stage.checked
    assert (await stage.place(number)).split()[1] == "rollback"
    [transaction_id] = stage.between.halves
    verdict = await stage.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("rollback", "check")
    assert number not in stage.orders()
    # Its own end says the same.
    assert [(status, end["replayed"]) for status, end in stage.between.ends] == [(200, True)]


async def checked_during(stage: Stage, number: int, *, commits: bool) -> None:
    """A check while the local database transaction is open waits for it."""
    with closing(psycopg.connect(stage.shop.info.dsn, password=stage.shop.info.password)) as held:
        # The producer's insert of the same order waits for this one to commit or roll back.
        held.execute("insert into orders values (%s)", [number])
        placing = asyncio.create_task(stage.place(number))
        await stage.waiting(1)
        [transaction_id] = stage.between.halves
        await stage.ask(transaction_id)
        # A check that gave up waiting, on a machine that is held up, is followed by another one.
        await stage.waiting(2)
        assert (await stage.halfnote.get(f"/transactions/{transaction_id}")).json().get("verdict") is None
        held.rollback() if commits else held.commit()
    told = (await placing).split()[1]
    verdict = await stage.verdict(transaction_id)
    assert told == verdict["verdict"] == ("commit" if commits else "rollback")
    assert number in stage.orders()
    assert [status for status, _ in stage.between.ends] == [200]


async def checked_after(stage: Stage, number: int) -> None:
    """A check after the local database transaction and before the end answers with its outcome."""
    stage.between.before_end = stage.checked
    assert (await stage.place(number)).split()[1] == "commit"
    [transaction_id] = stage.between.halves
    verdict = await stage.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("commit", "check")
    assert number in stage.orders()
    assert [(status, end["replayed"]) for status, end in stage.between.ends] == [(200, True)]


async def dead_before_its_end(stage: Stage, number: int) -> None:
    """The producer dies after its commit and answers the check after its restart."""

    async def die(_: str) -> None:
        stage.producer.kill()
        raise web.HTTPBadGateway

    stage.between.before_end = die
    with pytest.raises(httpx.TransportError):
        await stage.place(number)
    assert number in stage.orders()
    await started(stage.producer)
    [transaction_id] = stage.between.halves
    await stage.ask(transaction_id)
    verdict = await stage.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("commit", "check")


async def test_the_check_comes_before_during_and_after_the_local_transaction(stage: Stage) -> None:
    cases = (
        kept_and_announced,
        checked_before,
        partial(checked_during, commits=True),
        partial(checked_during, commits=False),
        checked_after,
        dead_before_its_end,
    )
    for number, case in enumerate(cases, 1030):
        stage.between.forget()
        await case(stage, number)


async def test_checks_race_with_local_transactions(stage: Stage) -> None:
    hazard = random.Random(1030)
    asking: set[asyncio.Task[None]] = set()

    async def ask_some_time(transaction_id: str) -> None:
        async def ask(after_s: float) -> None:
            await asyncio.sleep(after_s)
            await stage.ask(transaction_id)

        asking.add(asyncio.create_task(ask(hazard.random() * 0.03)))
        await asyncio.sleep(hazard.random() * 0.03)

    async def some_time(_: str) -> None:
        await asyncio.sleep(hazard.random() * 0.03)

    stage.between.after_half, stage.between.before_end = ask_some_time, some_time
    turns = asyncio.Semaphore(12)

    async def place(number: int) -> None:
        async with turns:
            await stage.place(number)

    # One in four is an order that was placed before.
    await asyncio.gather(*(place(number - number % 4 // 3) for number in range(RACES)))
    await asyncio.gather(*asking)
    verdicts = {one: await stage.verdict(one) for one in stage.between.halves}
    announced = [number for one, number in stage.between.halves.items() if verdicts[one]["verdict"] == "commit"]
    assert len(verdicts) == RACES
    assert sorted(announced) == stage.orders()
    # Both sides decided some of them, and no end contradicted a check's answer.
    assert {verdict["source"] for verdict in verdicts.values()} == {"check", "producer"}
    assert {verdict["verdict"] for verdict in verdicts.values()} == {"commit", "rollback"}
    assert {status for status, _ in stage.between.ends} == {200}


@pytest.mark.parametrize("name", LANGUAGES)
async def test_a_check_that_is_not_signed_is_refused(name: str, tmp_path: Path) -> None:
    producer = Producer(require(name), tmp_path, "http://127.0.0.1:9", postgres.server().url)
    try:
        await started(producer)
        one, another = (UUID(f"019a9f1c-1030-7b1e-8f00-1030a1030a1{digit}") for digit in range(2))
        good, body = signed_check(one, "shop", secret=SECRET)
        _, other = signed_check(another, "shop", secret=SECRET)
        old, _ = signed_check(one, "shop", secret=SECRET, at=1_700_000_000)
        async with httpx.AsyncClient() as client:
            for headers, content in ((good, other), (old, body)):
                came = await client.post(f"{producer.url}/halfnote/check", headers=headers, content=content)
                assert came.status_code == 401
    finally:
        producer.kill()


@pytest.mark.parametrize("source", ["go/producer.go", "java/Producer.java", "node/producer.js"])
def test_a_producer_has_less_than_eighty_lines(source: str) -> None:
    lines = (EXAMPLES / source).read_text().splitlines()
    assert len(lines) < 80
    assert max(len(line.expandtabs(4)) for line in lines) <= 120


COMMANDS = {"go": "cd examples/go && go run .", "java": "java -cp", "node": "cd examples/node && npm ci && node"}


@pytest.mark.parametrize("name", LANGUAGES)
async def test_each_is_run_as_the_page_says(name: str, data_dir: Path, dsn: str, tmp_path: Path) -> None:
    """The commands of docs/protocol.md, but for `npm ci` and where the driver lies: `make test-deps` saw to these."""
    [block] = re.findall(r"```shell\n(.*?)```", (ROOT / "docs" / "protocol.md").read_text(), re.DOTALL)
    [line] = [line for line in block.splitlines() if line.startswith(COMMANDS[name])]
    line = line.replace("npm ci && ", "").replace("postgresql-42.7.7.jar", str(DRIVER))
    told = replace(require(name), command=lambda _: ["bash", "-c", f"cd {ROOT} && {line}"])
    async with staged(told, data_dir, dsn, tmp_path) as stage:
        call = re.findall(r"^curl .*$", block, re.MULTILINE)[0].replace("http://127.0.0.1:9030", stage.producer.url)
        came = await asyncio.create_subprocess_exec(*shlex.split(call), "-sf", stdout=asyncio.subprocess.PIPE)
        printed, _ = await came.communicate()
        assert came.returncode == 0
        assert printed.split()[1] == b"commit"
        assert stage.orders() == [1030]
