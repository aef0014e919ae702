"""The producers of examples/ directly at the service, without the proxy of the tests in `tests/system`.

Java's `HttpClient` offers HTTP/2 with its first request, by `Upgrade: h2c`. The proxy's library ignores that, so those
tests cannot see what the service does with it.
"""

from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import httpx
import psycopg
import pytest
from halfnote.barrier_sql import BarrierSql

from app.database.connection import Connection
from tests.conftest import register_group
from tests.support import postgres
from tests.support.processes import Service
from tests.support.producers import LANGUAGES, Producer, require
from tests.system.test_example_producers import started


@pytest.fixture
async def service(db: Connection, dsn: str, tmp_path: Path) -> AsyncIterator[Service]:
    """The service as a process of its own; the group `shop` is registered."""
    await register_group(db, "shop")
    service = Service(tmp_path / "data", "serve", HALFNOTE_DATABASE_URL=dsn)
    await service.start()
    yield service
    service.stop()


@pytest.mark.parametrize("name", LANGUAGES)
async def test_a_producer_calls_the_service_itself(service: Service, name: str, db: Connection, tmp_path: Path) -> None:
    language, database = require(name), postgres.create_database()
    producer = None
    try:
        with closing(psycopg.connect(database, autocommit=True)) as shop:
            shop.execute("create table orders (number int primary key)")
            shop.execute(BarrierSql("postgresql", "halfnote_barrier", 3).create.encode())
            producer = Producer(language, tmp_path, service.url, database)
            await started(producer)
            async with httpx.AsyncClient(timeout=60) as caller:
                answer = await caller.post(f"{producer.url}/orders/1030")
            assert answer.status_code == 200, answer.text
            transaction_id, verdict = answer.text.split()[:2]
            assert verdict == "commit"
            assert shop.execute("select number from orders").fetchall() == [(1030,)]
        assert await db.fetchval("select count(*) from outbox where transaction_id = $1", transaction_id) == 1
    finally:
        if producer is not None:
            producer.kill()
        postgres.drop_database(database)
