"""The environment of a story in one way: its databases, processes, producer group and subscriptions."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx

from demo.processes import StepFailed, new_secret
from examples.order_1030 import consumer
from examples.order_1030.programs import Program
from examples.order_1030.service import CHECK_PATH, Options
from examples.order_1030.stories import Story
from examples.order_1030.ways import Way

# Short times for a short run: check-back comes a second after a death, and failed deliveries are retried soon.
IMMUNITY_S, INTERVAL_S = 1, 1
RETRY_S = [0.3, 0.5] + [1] * 90
OVER_S = 300.0


@dataclass(frozen=True)
class Servers:
    """Shared settings: Halfnote's URL, the URL of one database of a Postgres server, a directory for logs."""

    halfnote: str
    postgres: str
    logs: Path


class Stage:
    """`group` is the name of the producer group, and of the topic."""

    def __init__(self, servers: Servers, story: Story, way: Way, group: str) -> None:
        self.servers, self.story, self.way, self.group = servers, story, way, group
        # Idle connections are closed here before Halfnote closes them, because that could happen while a request is
        # sent.
        limits = httpx.Limits(keepalive_expiry=2)
        self.halfnote = httpx.AsyncClient(base_url=servers.halfnote, timeout=60, limits=limits)
        self.databases: dict[str, str] = {}
        self.consumers: dict[str, Program] = {}
        self.service: Program

    async def set(self, to_halfnote: str, immunity_s: int, stack: AsyncExitStack) -> None:
        """Make the databases, start the processes and register them. The service reaches Halfnote at `to_halfnote`."""
        secret = new_secret()
        own = await self._database("own", self.story.schema)
        options = Options(self.way.name, own, to_halfnote, self.group, secret)
        self.service = self._program("own", self.story.create_app, options)
        for name in self.story.consumers:
            url = await self._database(name, consumer.SCHEMAS[name])
            takes = consumer.Options(name, url, secret, self.way.exact)
            self.consumers[name] = self._program(name, consumer.create_app, takes)
        for program in (self.service, *self.consumers.values()):
            stack.push_async_callback(program.stop)
        await asyncio.gather(*(program.start() for program in (self.service, *self.consumers.values())))
        policy = {"immunity_s": immunity_s, "interval_s": INTERVAL_S, "max_checks": 1000}
        group = {"check_urls": [self.service.url + CHECK_PATH], "secret": secret, **policy}
        await self.call("PUT", f"/producer-groups/{self.group}", group)
        for name, program in self.consumers.items():
            await self._subscribe(name, program, secret)

    def subscription(self, name: str) -> str:
        """Return the name of a consumer's subscription."""
        return f"{self.group}.{name}"

    async def call(self, method: str, path: str, content: Any = None) -> Any:
        """Call Halfnote. Raises StepFailed if it refuses."""
        answer = await self.halfnote.request(method, path, json=content)
        if not answer.is_success:
            raise StepFailed(f"{method} {path} was answered {answer.status_code}: {answer.text}")
        return answer.json()

    async def until_over(self) -> None:
        """Wait until every transaction is decided and every message is delivered or dead. Raises StepFailed."""
        deadline = time.monotonic() + OVER_S
        while await self._undecided() or await self._undelivered():
            if time.monotonic() > deadline:
                raise StepFailed(f"{self.group} has unfinished transactions or deliveries after {OVER_S:g} s")
            await asyncio.sleep(0.1)

    async def dead_letters(self) -> int:
        """Return how many messages wait for a person."""
        return sum([one["dead_letters"] for one in await self._subscriptions()])

    async def _undecided(self) -> bool:
        cursor: dict[str, str] = {}
        while True:
            page = await self._get("/transactions", producer_group=self.group, limit="1000", **cursor)
            states = {one["state"] for one in page["items"]}
            if "parked" in states:
                raise StepFailed(f"a transaction of {self.group} was parked")
            if states & {"half", "in_doubt"}:
                return True
            if page["next_cursor"] is None:
                return False
            cursor = {"cursor": page["next_cursor"]}

    async def _undelivered(self) -> bool:
        found = await self._subscriptions()
        return any(one["lag"]["messages"] or not one["lag"]["exact"] or one["retrying"] for one in found)

    async def _subscriptions(self) -> list[dict[str, Any]]:
        return [await self._get(f"/subscriptions/{self.subscription(name)}") for name in self.story.consumers]

    async def _get(self, path: str, **query: str) -> dict[str, Any]:
        answer = await self.halfnote.get(path, params=query)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    async def _subscribe(self, name: str, program: Program, secret: str) -> None:
        destination = {"type": "webhook", "url": f"{program.url}/deliveries", "secret": secret}
        content = {"topics": [self.group], "destination": destination, "retry": RETRY_S, "timeout_s": 5.0}
        await self.call("PUT", f"/subscriptions/{self.subscription(name)}", content)

    async def _database(self, name: str, schema: str) -> str:
        database = f"{self.group}.{name}"
        url = urlunsplit(urlsplit(self.servers.postgres)._replace(path=f"/{database}"))
        connection = await asyncpg.connect(self.servers.postgres)
        await connection.execute(f'create database "{database}"')
        await connection.close()
        connection = await asyncpg.connect(url)
        await connection.execute(schema)
        await connection.close()
        self.databases[name] = url
        return url

    def _program(self, name: str, create_app: Any, options: Any) -> Program:
        return Program(create_app, options, self.servers.logs / f"{self.group}.{name}.log")


@asynccontextmanager
async def staged(
    servers: Servers, story: Story, way: Way, *, act: str, to_halfnote: str | None = None, immunity_s: int = IMMUNITY_S
) -> AsyncIterator[Stage]:
    """Yield the environment of an act, whose name distinguishes its databases. All of it ends with the block."""
    stage = Stage(servers, story, way, f"{act}.{way.name}")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(stage.halfnote.aclose)
        await stage.set(to_halfnote or servers.halfnote, immunity_s, stack)
        yield stage
