"""The producers in Go, Java and Node of examples/, against the real service and a separate Postgres.

The check runs before, during and after the local database transaction. In every case the producer's database and the
recorded verdict agree.
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
from tests.support.producers import DRIVER, EXAMPLES, LANGUAGES, SECRET, HalfnoteProxy, Language, Producer, require

RACES = 300
WITHIN_S = 120.0
# Backends that wait for another database transaction.
WAITING = """
select count(*) from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock' and pid <> pg_backend_pid()
"""

pytestmark = pytest.mark.timeout(900)


@dataclass
class Deployment:
    """A producer, the proxy between it and Halfnote, and the records of both."""

    producer: Producer
    proxy: HalfnoteProxy
    halfnote: httpx.AsyncClient
    shop: psycopg.Connection

    async def place_order(self, number: int) -> str:
        """Place an order; return the producer's answer."""
        async with httpx.AsyncClient(timeout=WITHIN_S) as caller:
            answer = await caller.post(f"{self.producer.url}/orders/{number}")
        assert answer.status_code == 200, answer.text
        return answer.text

    async def ask(self, transaction_id: str) -> None:
        """Make Halfnote check now, unless the transaction is decided."""
        answer = await self.halfnote.post(f"/transactions/{transaction_id}/check")
        assert answer.status_code in (200, 202, 409), answer.text

    async def verdict(self, transaction_id: str) -> dict[str, Any]:
        """Wait for the recorded verdict and return it."""
        found: dict[str, Any] = {}

        async def decided() -> bool:
            nonlocal found
            found = (await self.halfnote.get(f"/transactions/{transaction_id}")).json().get("verdict") or {}
            return bool(found)

        await until(decided)
        return found

    async def checked(self, transaction_id: str) -> None:
        """Make Halfnote check, and wait until the transaction is decided."""
        await self.ask(transaction_id)
        await self.verdict(transaction_id)

    def orders(self) -> list[int]:
        """Return the orders in the producer's database."""
        return [row[0] for row in self.shop.execute("select number from orders order by number").fetchall()]

    async def waiting(self, count: int) -> None:
        """Wait until this many of the producer's database transactions wait for a lock."""

        async def waits() -> bool:
            found = self.shop.execute(WAITING).fetchone()
            return found is not None and found[0] >= count

        await until(waits)


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await reached():
            await asyncio.sleep(0.02)


@asynccontextmanager
async def deployed(language: Language, data_dir: Path, dsn: str, place: Path) -> AsyncIterator[Deployment]:
    database = postgres.create_database()
    service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    producer = None
    try:
        async with HalfnoteProxy(service.url) as proxy, httpx.AsyncClient(base_url=service.url, timeout=60) as halfnote:
            with closing(psycopg.connect(database, autocommit=True)) as shop:
                shop.execute("create table orders (number int primary key)")
                shop.execute(BarrierSql("postgresql", "halfnote_barrier", 3).create.encode())
                producer = Producer(language, place, proxy.url, database)
                await started(producer)
                group = {"check_urls": [f"{producer.url}/halfnote/check"], "secret": SECRET}
                assert (await halfnote.put("/producer-groups/shop", json=group)).status_code == 201
                yield Deployment(producer, proxy, halfnote, shop)
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
                answer = await client.post(f"{producer.url}/halfnote/check", headers=headers, content=body)
            except httpx.TransportError:
                return not producer.alive()
            return answer.status_code in (200, 204)

        await until(answers)


@pytest.fixture(params=LANGUAGES)
async def deployment(
    request: pytest.FixtureRequest, data_dir: Path, dsn: str, tmp_path: Path
) -> AsyncIterator[Deployment]:
    async with deployed(require(request.param), data_dir, dsn, tmp_path) as deployment:
        yield deployment


async def committed_by_the_producer(deployment: Deployment, number: int) -> None:
    printed = await deployment.place_order(number)
    [(transaction_id, sent)] = deployment.proxy.halves.items()
    assert sent == number
    assert printed.split()[:2] == [transaction_id, "commit"]
    verdict = await deployment.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("commit", "producer")
    assert number in deployment.orders()
    # The shop's own database refuses the same order a second time.
    assert (await deployment.place_order(number)).split()[1] == "rollback"
    _, again = deployment.proxy.halves
    assert (await deployment.verdict(again))["verdict"] == "rollback"


async def checked_before(deployment: Deployment, number: int) -> None:
    """A check before the local database transaction prevents it."""
    deployment.proxy.after_half = deployment.checked
    assert (await deployment.place_order(number)).split()[1] == "rollback"
    [transaction_id] = deployment.proxy.halves
    verdict = await deployment.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("rollback", "check")
    assert number not in deployment.orders()
    # The producer's own end brings the same verdict.
    assert [(status, end["replayed"]) for status, end in deployment.proxy.ends] == [(200, True)]


async def checked_during(deployment: Deployment, number: int, *, commits: bool) -> None:
    """A check while the local database transaction is open waits for it."""
    with closing(psycopg.connect(deployment.shop.info.dsn, password=deployment.shop.info.password)) as blocker:
        # The producer's insert of the same order waits for this one to commit or roll back.
        blocker.execute("insert into orders values (%s)", [number])
        placing_order = asyncio.create_task(deployment.place_order(number))
        await deployment.waiting(1)
        [transaction_id] = deployment.proxy.halves
        await deployment.ask(transaction_id)
        # On a slow machine a check may time out while it waits; another one follows.
        await deployment.waiting(2)
        assert (await deployment.halfnote.get(f"/transactions/{transaction_id}")).json().get("verdict") is None
        blocker.rollback() if commits else blocker.commit()
    printed_verdict = (await placing_order).split()[1]
    verdict = await deployment.verdict(transaction_id)
    assert printed_verdict == verdict["verdict"] == ("commit" if commits else "rollback")
    assert number in deployment.orders()
    assert [status for status, _ in deployment.proxy.ends] == [200]


async def checked_after(deployment: Deployment, number: int) -> None:
    """A check after the local database transaction and before the end answers with its outcome."""
    deployment.proxy.before_end = deployment.checked
    assert (await deployment.place_order(number)).split()[1] == "commit"
    [transaction_id] = deployment.proxy.halves
    verdict = await deployment.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("commit", "check")
    assert number in deployment.orders()
    assert [(status, end["replayed"]) for status, end in deployment.proxy.ends] == [(200, True)]


async def killed_before_its_end(deployment: Deployment, number: int) -> None:
    """The producer dies after its commit and answers the check after its restart."""

    async def die(_: str) -> None:
        deployment.producer.kill()
        raise web.HTTPBadGateway

    deployment.proxy.before_end = die
    with pytest.raises(httpx.TransportError):
        await deployment.place_order(number)
    assert number in deployment.orders()
    await started(deployment.producer)
    [transaction_id] = deployment.proxy.halves
    await deployment.ask(transaction_id)
    verdict = await deployment.verdict(transaction_id)
    assert (verdict["verdict"], verdict["source"]) == ("commit", "check")


async def test_a_check_before_during_or_after_the_local_transaction_gives_its_outcome(deployment: Deployment) -> None:
    cases = (
        committed_by_the_producer,
        checked_before,
        partial(checked_during, commits=True),
        partial(checked_during, commits=False),
        checked_after,
        killed_before_its_end,
    )
    for number, case in enumerate(cases, 1030):
        deployment.proxy.reset()
        await case(deployment, number)


async def test_checks_race_with_local_transactions(deployment: Deployment) -> None:
    rng = random.Random(1030)
    checks: set[asyncio.Task[None]] = set()

    async def ask_after_random_delay(transaction_id: str) -> None:
        async def ask(after_s: float) -> None:
            await asyncio.sleep(after_s)
            await deployment.ask(transaction_id)

        checks.add(asyncio.create_task(ask(rng.random() * 0.03)))
        await asyncio.sleep(rng.random() * 0.03)

    async def random_delay(_: str) -> None:
        await asyncio.sleep(rng.random() * 0.03)

    deployment.proxy.after_half, deployment.proxy.before_end = ask_after_random_delay, random_delay
    concurrency = asyncio.Semaphore(12)

    async def place(number: int) -> None:
        async with concurrency:
            await deployment.place_order(number)

    # One in four orders was placed before.
    await asyncio.gather(*(place(number - number % 4 // 3) for number in range(RACES)))
    await asyncio.gather(*checks)
    verdicts = {one: await deployment.verdict(one) for one in deployment.proxy.halves}
    announced = [number for one, number in deployment.proxy.halves.items() if verdicts[one]["verdict"] == "commit"]
    assert len(verdicts) == RACES
    assert sorted(announced) == deployment.orders()
    # Both sides decided some of them, and no end contradicted a check's answer.
    assert {verdict["source"] for verdict in verdicts.values()} == {"check", "producer"}
    assert {verdict["verdict"] for verdict in verdicts.values()} == {"commit", "rollback"}
    assert {status for status, _ in deployment.proxy.ends} == {200}


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
                answer = await client.post(f"{producer.url}/halfnote/check", headers=headers, content=content)
                assert answer.status_code == 401
    finally:
        producer.kill()


@pytest.mark.parametrize("source", ["go/producer.go", "java/Producer.java", "node/producer.js"])
def test_a_producer_has_less_than_eighty_lines(source: str) -> None:
    lines = (EXAMPLES / source).read_text().splitlines()
    assert len(lines) < 80
    assert max(len(line.expandtabs(4)) for line in lines) <= 120


COMMANDS = {"go": "cd examples/go && go run .", "java": "java -cp", "node": "cd examples/node && npm ci && node"}


@pytest.mark.parametrize("name", LANGUAGES)
async def test_each_producer_runs_by_the_commands_of_the_page(
    name: str, data_dir: Path, dsn: str, tmp_path: Path
) -> None:
    """Run the commands of docs/protocol.md, without `npm ci` and with the driver that `make test-deps` fetched."""
    [block] = re.findall(r"```shell\n(.*?)```", (ROOT / "docs" / "protocol.md").read_text(), re.DOTALL)
    [line] = [line for line in block.splitlines() if line.startswith(COMMANDS[name])]
    line = line.replace("npm ci && ", "").replace("postgresql-42.7.7.jar", str(DRIVER))
    documented = replace(require(name), command=lambda _: ["bash", "-c", f"cd {ROOT} && {line}"])
    async with deployed(documented, data_dir, dsn, tmp_path) as deployment:
        call = re.findall(r"^curl .*$", block, re.MULTILINE)[0].replace(
            "http://127.0.0.1:9030", deployment.producer.url
        )
        curl = await asyncio.create_subprocess_exec(*shlex.split(call), "-sf", stdout=asyncio.subprocess.PIPE)
        printed, _ = await curl.communicate()
        assert curl.returncode == 0
        assert printed.split()[1] == b"commit"
        assert deployment.orders() == [1030]
