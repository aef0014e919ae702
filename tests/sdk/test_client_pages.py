"""docs/clients/: the services that the pages make, run as the pages say, against the real service over real sockets.

Each is sent an order, which must come to its own consumer, and asked about transactions whose end is missing.
"""

import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from halfnote.ids import new_id

from tests.conftest import app_of, migrated_template
from tests.sdk.doc_blocks import blocks_of, runner, shell_blocks_of
from tests.sdk.servers import asgi_server
from tests.sdk.shop import fresh, with_driver
from tests.support import postgres
from tests.support.processes import ROOT, free_port, serving

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000"
WITHIN_S = 120.0
PROGRAMS = {
    "halfnote": ["app.cli"],
    "uvicorn": ["uvicorn"],
    "flask": ["flask"],
    "django-admin": ["django"],
}

# The page's lifespan twice in one process and on one loop, as in tests of an application, with the page's producer.
FASTAPI_TWICE = """
import asyncio

import httpx
import shop


async def twice() -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shop.app), base_url="http://shop") as client:
        for number in (2010, 2020):
            async with shop.lifespan(shop.app):
                answer = await client.post(f"/orders/{number}")
                assert (answer.status_code, answer.json()["end"]) == (201, "recorded")
            answer = await client.post("/orders/2021")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


asyncio.run(twice())
"""
FLASK_CLOSED = """
import shop

shop.producer.close()
answer = shop.app.test_client().post("/orders/2050")
assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
"""


@pytest.fixture(scope="module")
def halfnote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real service, one for all pages."""
    dsn = postgres.create_database(migrated_template())
    with serving(tmp_path_factory.mktemp("service"), dsn) as url:
        yield url
    postgres.drop_database(dsn)


@pytest.fixture
async def api(halfnote: str) -> AsyncIterator[httpx.AsyncClient]:
    """The service's API; the page's subscription is deleted at the end."""
    async with httpx.AsyncClient(base_url=halfnote, timeout=60) as client:
        yield client
        await client.delete("/subscriptions/points")


async def until(reached: Callable[[], Any]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not (await found if isinstance(found := reached(), Awaitable) else found):
            await asyncio.sleep(0.05)


async def announced_and_asked(api: httpx.AsyncClient, shop: str, orders: str, points: str, number: int) -> None:
    """Assert that a service's order gives points and that its barrier answers for transactions without an end.

    `orders` and `points`: the tables' names.
    """
    with closing(psycopg.connect(shop, autocommit=True)) as connection:

        def has(table: str, one: int) -> bool:
            column = "number" if table == orders else '"order"'
            return bool(connection.execute(f"select from {table} where {column} = {one}".encode()).rowcount)

        assert has(orders, number)
        await until(lambda: has(points, number))
        done, undone = new_id(), new_id()
        for one in (done, undone):
            half: dict[str, Any] = {
                "producer_group": "shop",
                "transaction_id": str(one),
                "context": {"halfnote_barrier": True},
            }
            half["messages"] = [{"topic": "order", "body": {"order": number + 1}}]
            assert (await api.post("/half", json=half)).status_code == 201
        connection.execute("insert into halfnote_barrier (transaction_id, reason) values (%s, 'local')", [done])
        for one, state in ((done, "committed"), (undone, "rolled_back")):
            assert (await api.post(f"/transactions/{one}/check")).status_code == 202

            async def stands(one: Any = one, state: str = state) -> bool:
                return bool((await api.get(f"/transactions/{one}")).json()["state"] == state)

            await until(stands)
        await until(lambda: has(points, number + 1))


def arguments_of(line: str) -> list[str]:
    """Return a command of a page as arguments of Python's `-m`."""
    program, *arguments = shlex.split(line)
    return [*PROGRAMS[program], *arguments]


def run_commands(commands: str, place: Path = ROOT, **environment: str) -> None:
    """Run a page's commands in a shell in which the programs are those of this interpreter."""
    programs = (f'{name}() {{ "$PYTHON" -m {module} "$@"; }}\n' for name, [module] in PROGRAMS.items())
    answer = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join(programs) + commands],
        cwd=place,
        env={**os.environ, "PYTHON": sys.executable, "SHOP_SECRET": SECRET, **environment},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


class Site:
    """A page's program in a separate directory: its files, its commands, its server."""

    def __init__(self, page: str, place: Path, **environment: str) -> None:
        self.place, self.port = place, free_port()
        self._log = place / "server.log"
        self._blocks = [block.splitlines() for block in shell_blocks_of(page)]
        path = os.pathsep.join(map(str, (place, ROOT / "sdk", ROOT)))
        self._environment = {**os.environ, "PYTHONPATH": path, "SHOP_SECRET": SECRET, **environment}
        for block in blocks_of(page):
            name, text = block.split("\n", 1)
            file = place / name.removeprefix("# ")
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as out:
                out.write(text + "\n\n")

    def run(self, *arguments: str) -> None:
        """Run a Python program with the site's environment to its end."""
        answer = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=self.place, env=self._environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Run the page's commands, the last of which is its server; yield its URL."""
        *commands, server = (line.replace("9030", str(self.port)) for line in self._blocks[0])
        await asyncio.to_thread(run_commands, "\n".join(commands), self.place, **self._environment)
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments_of(server)],
                cwd=self.place,
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        url = f"http://127.0.0.1:{self.port}"
        try:
            async with httpx.AsyncClient(base_url=url) as client:

                async def answers() -> bool:
                    assert process.poll() is None, self._log.read_text()
                    try:
                        return (await client.post("/halfnote/check")).status_code == 401
                    except httpx.TransportError:
                        return False

                await until(answers)
            yield url
        finally:
            process.terminate()
            process.wait(60)

    async def place_as_the_page_says(self, number: int) -> Any:
        """Send an order by the page's call; return the answer."""
        [line] = self._blocks[1]
        program, *arguments = shlex.split(line.replace("/1030", f"/{number}").replace("9030", str(self.port)))
        assert program == "curl"
        answer = await asyncio.create_subprocess_exec(program, "-sf", *arguments, stdout=asyncio.subprocess.PIPE)
        answered, _ = await answer.communicate()
        assert answer.returncode == 0
        return json.loads(answered)


async def placed(url: str, path: str) -> Any:
    """Send an order; return the answer."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.post(path)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_fastapi(halfnote: str, api: httpx.AsyncClient, tmp_path: Path) -> None:
    shop = fresh("")
    database = with_driver(shop, "asyncpg")
    site = Site("docs/clients/fastapi.md", tmp_path, HALFNOTE_URL=halfnote, SHOP_DATABASE=database)
    await asyncio.to_thread(site.run, "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py")
    (tmp_path / "twice.py").write_text(FASTAPI_TWICE)
    await known_group(api)
    await asyncio.to_thread(site.run, "twice")
    async with site.serving() as url:
        assert (await site.place_as_the_page_says(2030))["end"] == "recorded"
        assert (await placed(url, "/bound/2040"))["end"] == "recorded"
        await announced_and_asked(api, shop, "orders", "points", 2030)
        await announced_and_asked(api, shop, "orders", "points", 2040)


async def test_flask(halfnote: str, api: httpx.AsyncClient, tmp_path: Path) -> None:
    shop = fresh("")
    site = Site("docs/clients/flask.md", tmp_path, HALFNOTE_URL=halfnote, SHOP_DATABASE=with_driver(shop, "psycopg"))
    async with site.serving() as url:
        assert (await site.place_as_the_page_says(2030))["end"] == "recorded"
        assert (await placed(url, "/bound/2040"))["end"] == "recorded"
        await announced_and_asked(api, shop, "orders", "points", 2030)
        await announced_and_asked(api, shop, "orders", "points", 2040)
    await asyncio.to_thread(site.run, "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py")
    (tmp_path / "closed.py").write_text(FLASK_CLOSED)
    await asyncio.to_thread(site.run, "closed")


async def test_django(halfnote: str, api: httpx.AsyncClient, tmp_path: Path) -> None:
    shop = fresh("")
    settings = {"DJANGO_SETTINGS_MODULE": "settings", "HALFNOTE_URL": halfnote, "SHOP_DATABASE": shop}
    site = Site("docs/clients/django.md", tmp_path, **settings)
    async with site.serving():
        assert (await site.place_as_the_page_says(2030))["end"] == "recorded"
        await announced_and_asked(api, shop, "shop_order", "shop_points", 2030)
    await asyncio.to_thread(site.run, "django", "test")


async def test_django_in_an_app_that_has_migrations(tmp_path: Path) -> None:
    shop, page = fresh(""), "docs/clients/django.md"
    settings = {"DJANGO_SETTINGS_MODULE": "settings", "HALFNOTE_URL": "http://127.0.0.1:9", "SHOP_DATABASE": shop}
    site = Site(page, tmp_path, **settings)
    migrations = tmp_path / "shop" / "migrations"
    own = migrations / "0001_halfnote.py"
    written = own.read_text()
    own.unlink()
    await asyncio.to_thread(site.run, "django", "makemigrations", "shop")
    await asyncio.to_thread(site.run, "django", "migrate")
    text = (ROOT / page).read_text()
    [name] = re.findall(r"`shop/migrations/(0002\w+\.py)`", text)
    [dependencies] = re.findall(r"`(dependencies = .*?)`", text)
    (migrations / name).write_text(written.replace("initial = True", dependencies))
    await asyncio.to_thread(site.run, "django", "makemigrations", "--check", "shop")
    await asyncio.to_thread(site.run, "django", "migrate")
    with closing(psycopg.connect(shop)) as connection:
        tables = {row[0] for row in connection.execute("select tablename from pg_tables where schemaname = 'public'")}
    assert {"shop_order", "shop_points", "halfnote_barrier", "halfnote_inbox"} <= tables


@asynccontextmanager
async def registered(api: httpx.AsyncClient, app: Any) -> AsyncIterator[None]:
    """Serve a page's app, and make its group and subscription."""
    async with asgi_server(app) as url:
        group = {"check_urls": [f"{url}/halfnote/check"], "secret": SECRET}
        assert (await api.put("/producer-groups/shop", json=group)).status_code in (200, 201)
        destination = {"type": "webhook", "url": f"{url}/deliveries", "secret": SECRET}
        subscription = {"topics": ["order"], "destination": destination}
        assert (await api.put("/subscriptions/points", json=subscription)).status_code == 201
        yield


async def known_group(api: httpx.AsyncClient) -> None:
    """Register the group before anything can be asked there."""
    group = {"check_urls": ["http://127.0.0.1:9/halfnote/check"], "secret": SECRET}
    assert (await api.put("/producer-groups/shop", json=group)).status_code in (200, 201)


async def test_sqlalchemy(halfnote: str, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = fresh("")
    environment = {"HALFNOTE_URL": halfnote, "SHOP_DATABASE": with_driver(shop, "asyncpg"), "SHOP_SECRET": SECRET}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    page = "docs/clients/sqlalchemy.md"
    run, names = runner(page), dict[str, Any]()
    await known_group(api)
    first, alembic, *blocks = blocks_of(page)
    await run(first, names)
    await run(alembic, names)
    async with names["engine"].begin() as connection:
        await connection.run_sync(upgraded, names["upgrade"], names["downgrade"])
    for block in blocks:
        await run(block, names)
    async with registered(api, names["app"]):
        assert (await names["place"](2030)).end == "recorded"
        assert (await asyncio.to_thread(names["place_sync"], 2040)).end == "recorded"
        await announced_and_asked(api, shop, "orders", "points", 2030)
        await announced_and_asked(api, shop, "orders", "points", 2040)
        await all_announced(api, shop)
    await names["producer"].close()
    await asyncio.to_thread(names["sync_producer"].close)
    await names["engine"].dispose()
    names["sync_engine"].dispose()


def upgraded(connection: Any, *steps: Callable[[], None]) -> None:
    """Run a migration's functions as Alembic does."""
    with Operations.context(MigrationContext.configure(connection)):
        for step in steps:
            step()


async def all_announced(api: httpx.AsyncClient, shop: str) -> None:
    """Assert that exactly the orders that the page's blocks kept are committed, also those left to a check."""
    with closing(psycopg.connect(shop)) as connection:
        kept = [row[0] for row in connection.execute("select number from orders")]
    committed: set[int] = set()

    async def agree() -> bool:
        undecided = [
            (await api.get("/transactions", params={"state": s})).json()["items"] for s in ("half", "in_doubt")
        ]
        return not any(undecided)

    await until(agree)
    found = (await api.get("/transactions", params={"state": "committed", "limit": 500})).json()["items"]
    with closing(psycopg.connect(shop)) as connection:
        own = {row[0] for row in connection.execute("select transaction_id::text from halfnote_barrier")}
    for transaction in found:
        if transaction["transaction_id"] in own:
            message = f"/messages/{transaction['transaction_id']}-0"
            committed.add((await api.get(message)).json()["body"]["order"])
    # Two were left open by the test itself, without an order.
    assert set(kept) <= committed
    assert committed - set(kept) <= {2031, 2041}


async def test_asyncpg(halfnote: str, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = fresh("")
    for name, value in {"HALFNOTE_URL": halfnote, "SHOP_DATABASE": shop, "SHOP_SECRET": SECRET}.items():
        monkeypatch.setenv(name, value)
    page = "docs/clients/asyncpg.md"
    run, names = runner(page), dict[str, Any]()
    await known_group(api)
    for block in blocks_of(page):
        await run(block, names)
    [commands] = shell_blocks_of(page)
    async with asgi_server(names["app"]) as url:
        written = commands.replace("http://127.0.0.1:9030", url)
        await asyncio.to_thread(run_commands, written, HALFNOTE_URL=halfnote)
        assert (await names["place"](2030)).end == "recorded"
        await announced_and_asked(api, shop, "orders", "points", 2030)
        await all_announced(api, shop)
    await names["producer"].close()
    await names["pool"].close()


@pytest.mark.parametrize("page", ["from-an-outbox", "from-rocketmq", "from-dtm"])
async def test_commands_of_the_guides(page: str, client: httpx.AsyncClient) -> None:
    [command] = shell_blocks_of(f"docs/{page}.md")
    async with asgi_server(app_of(client)) as url:
        await asyncio.to_thread(run_commands, command, HALFNOTE_URL=url)
    made = (await client.get("/subscriptions/points")).json()
    assert made["topics"] == re.findall(r"--topic (\S+)", command)
    assert made["destination"]["url"] == re.findall(r"--to (\S+)", command)[0]
