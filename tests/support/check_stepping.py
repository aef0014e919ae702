"""Transactions in doubt, and steps of check-back that tests take themselves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import httpx

from app.checkback.loop import CheckBack
from app.config import Settings
from app.database.connection import Connection
from app.ids import uuid7
from app.lifecycle.startup import assemble
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_now

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000"


COMMIT, ROLLBACK, UNKNOWN = ({"verdict": word} for word in ("commit", "rollback", "unknown"))


async def in_doubt(client: httpx.AsyncClient, runtime: Runtime, group: str = "shop", **fields: Any) -> UUID:
    """Post a half and have it checked at once."""
    message = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}
    answer = await client.post("/half", json={"producer_group": group, "messages": [message], **fields})
    transaction_id = UUID(answer.json()["transaction_id"])
    async with runtime.database.connection() as connection:
        assert await ask_now(connection, transaction_id, runtime.clock.now())
    return transaction_id


async def turn(runtime: Runtime, checks: CheckBack) -> int:
    """Take one step, wait for its checks, and return how many it claimed."""
    async with asyncio.timeout(60):
        result = await checks.step(runtime, runtime.clock.now())
        await checks.settle_all()
    return result.done


async def row(db: Connection, transaction_id: UUID) -> Any:
    return await db.fetchrow("select * from check_back where transaction_id = $1", transaction_id)


async def verdict(db: Connection, transaction_id: UUID) -> tuple[int, int] | None:
    found = await db.fetchrow("select verdict, source from op where transaction_id = $1", transaction_id)
    return tuple(found) if found else None


async def attempts(db: Connection, transaction_id: UUID) -> list[Any]:
    return await db.fetch(
        "select * from attempt where transaction_id = $1 and kind = 'check' order by attempt_id", transaction_id
    )


async def many_in_doubt(db: Connection, runtime: Runtime, group: str, count: int) -> list[UUID]:
    """Write `count` transactions that are in doubt and due."""
    now = runtime.clock.now()
    ids = sorted(uuid7(now) for _ in range(count))
    await db.copy_records_to_table(
        "half",
        columns=["transaction_id", "position", "producer_group", "topic", "content_type", "body", "body_digest",
                 "born_at", "first_check_at"],
        records=[(one, 0, group, "order", "application/json", b"1", b"", now, now) for one in ids],
    )  # fmt: skip
    await db.copy_records_to_table(
        "check_back",
        columns=["transaction_id", "producer_group", "state", "swept_at", "next_check_at"],
        records=[(one, group, 1, now, now) for one in ids],
    )
    return ids


@asynccontextmanager
async def replica(settings: Settings, dsn: str, **options: Any) -> AsyncIterator[Runtime]:
    """Another process over the same database, with other options."""
    async with AsyncExitStack() as stack:
        yield await assemble(settings.model_copy(update=options), dsn, stack)
