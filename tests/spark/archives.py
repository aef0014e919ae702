"""A day that the real service made, settled and ready to be archived."""

import asyncio
import base64
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import psycopg

from app.config import Settings
from app.database.connection import Connection, connect
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.runtime.state import Runtime
from spark.archive import records
from spark.archive.records import ArchivedDay
from spark.jobs import archive
from spark.manifest import TABLES
from spark.postgres import connections
from tests.conftest import client_of, migrated_template, register_group
from tests.support import postgres
from tests.support.days import all_delivered, go_to, long_ago, post_transaction, subscribe
from tests.support.proof_runs import looked_at

THEN = long_ago(10)
DAY = THEN.date()
# Past retention (7 days), not past the longest one (45 days).
NOW = THEN + timedelta(days=9)
MESSAGES: list[dict[str, Any]] = [
    {"topic": "order", "key": "order-1030", "headers": {"a.b": "\\N|"}, "body": None},
    {"topic": "日本|語", "tag": "\\", "body_base64": base64.b64encode(bytes(range(256))).decode()},
    {"topic": "order", "body": "", "deliver_after_s": 0.125},
]


def secret(number: int) -> str:
    """Return the text of a transaction's first message, which occurs in no other message."""
    return f"secret {number} of order 1030, told to nobody"


def messages(number: int) -> list[dict[str, Any]]:
    """Return a transaction's messages; they hold characters and bytes that a copy easily damages."""
    return [{**MESSAGES[0], "body": {"text": secret(number)}}, *MESSAGES[1:]]


async def settled_day(client: httpx.AsyncClient, runtime: Runtime, db: Connection) -> list[str]:
    """Make transactions, receipts and attempts of DAY, and write that the proof calls it final; return the ids."""
    await go_to(runtime, db, THEN)
    await db.execute("update day set state = 'gone' where day = $1", DAY - timedelta(days=1))
    billing = await subscribe(db, "billing", "*")
    ids = [await post_transaction(client, *messages(number)) for number in range(3)]
    ids.append(await post_transaction(client, verdict="rollback"))
    await db.execute(
        "insert into receipt select transaction_id, position, $1, \"offset\", 'delivered', 1, $2, 12, 200, "
        "decode('00ff', 'hex'), $2, 0 from outbox",
        billing,
        THEN,
    )
    await db.execute(
        "insert into attempt (transaction_id, kind, at, outcome, error) values ($1, 'check', $2, 'timed_out', 'a|b\\')",
        ids[0],
        THEN,
    )
    await all_delivered(db)
    await final(db)
    return ids


@dataclass(frozen=True)
class MadeDay:
    """A database with DAY, the ids of its transactions, and the directory of its archive, if it has one."""

    url: str
    ids: list[str]
    begun: datetime
    root: Path | None = None

    @contextmanager
    def copied(self, root: Path) -> Iterator[str]:
        """Yield the url of a copy of the database, whose archive is a copy at `root`."""
        names = [urlsplit(self.url).path[1:]]
        url = postgres.create_database(names[0])
        names.append(urlsplit(url).path[1:])
        try:
            if self.root is not None:
                shutil.copytree(self.root, root)
                # The archive names its database.
                owner = root / "halfnote.json"
                owner.write_text(owner.read_text().replace(*names))
                with psycopg.connect(url) as db:
                    moved = "update day set archive = replace(archive, %s, %s) where day = %s"
                    db.execute(moved, [str(self.root), str(root), DAY])
                assert root in path_of(row_of(url).archive).parents
            yield url
        finally:
            postgres.drop_database(url)


@contextmanager
def made_settled() -> Iterator[MadeDay]:
    """Make the settled day in a database of its own, with the producer group `shop`."""
    url, begun = postgres.create_database(migrated_template()), datetime.now(UTC)
    try:
        yield MadeDay(url, asyncio.run(_settle(url)), begun)
    finally:
        postgres.drop_database(url)


async def _settle(url: str) -> list[str]:
    async with AsyncExitStack() as stack:
        settings = Settings(_env_file=None, database_url=url, pool_size=2, linger_s=0)  # type: ignore[call-arg]
        runtime = await assemble(settings, url, stack)
        client = await stack.enter_async_context(client_of(runtime))
        db = await connect(url)
        stack.push_async_callback(db.close)
        await register_group(db, "shop")
        return await settled_day(client, runtime, db)


@contextmanager
def made_archived(settled: MadeDay, root: Path) -> Iterator[MadeDay]:
    """Archive the settled day below `root`, in a database of its own."""
    begun = datetime.now(UTC)
    with settled.copied(root) as url:
        assert archive.main(["--database-url", url, "--archive", str(root)]) == 0
        yield MadeDay(url, settled.ids, begun, root)


async def final(db: Connection, day: date = DAY) -> None:
    """Write that the proof calls a day final."""
    await looked_at(db, day, 1)
    await db.execute("update reconciliation_day set state = 'final' where day = $1", day)


async def write_ops(db: Connection, count: int, at: datetime = THEN) -> None:
    """Write rolled-back transactions of one message straight into the tables."""
    for _ in range(count):
        await db.execute(
            "with h as (insert into half (transaction_id, position, producer_group, topic, content_type, body, "
            "body_digest, born_at, first_check_at, digest) values ($1, 0, 'shop', 'x', 'text/plain', $2, sha256($2), "
            "$3, $3, '') returning transaction_id) insert into op select transaction_id, 2, 0, null, null, $3 from h",
            uuid7(at),
            f"body {_}".encode(),
            at,
        )


def row_of(dsn: str, day: date = DAY) -> ArchivedDay:
    """The day's row as the jobs see it."""
    with connections.connect(dsn) as connection:
        return records.day_of(connection, day)


def path_of(place: str | None) -> Path:
    """The directory of a `file:` URL."""
    assert place is not None
    return Path(unquote(urlsplit(place).path))


@contextmanager
def written(dsn: str, root: Path, *options: str) -> Iterator[tuple[Path, Future[int]]]:
    """`halfnote archive`, which has written the day's tables and reads nothing back before the block ends; yields the
    attempt's directory and the exit status to come.

    It waits for a lock on what it reads after the big tables.
    """
    with ThreadPoolExecutor(1) as thread, psycopg.connect(dsn) as other:
        other.execute("lock table subscription in access exclusive mode")
        ending = thread.submit(archive.main, ["--database-url", dsn, "--archive", str(root), *options])
        try:
            yield until_written(root, ending), ending
        finally:
            other.rollback()


def until_written(root: Path, ending: Future[int] | None = None) -> Path:
    """Wait until an attempt at DAY has a file of each table; return its directory."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert ending is None or not ending.done(), f"ended with {ending.result()}"
        for place in root.glob(f"day={DAY}/*"):
            # Files come to their place when a table is whole.
            if all(list((place / table).glob("*.parquet")) for table in TABLES):
                return place
        time.sleep(0.01)
    raise TimeoutError(f"nothing was written below {root}")


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    """Another content for a file, for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)
