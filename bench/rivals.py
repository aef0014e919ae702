"""The services to compare Halfnote with, on the same uvicorn and Postgres.

An ASGI echo, a FastAPI route that validates and stores nothing, and a naive but correct `/half` and `/end` (SQLAlchemy,
one database transaction per request, a state column). `uvicorn bench.rivals:app` serves them on a separate database,
whose URL is in BENCH_DSN.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal
from uuid import UUID, uuid4

import asyncpg
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import JSON, Column, DateTime, MetaData, Table, Text, Uuid, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

metadata = MetaData()
naive = Table(
    "naive",
    metadata,
    Column("transaction_id", Uuid, primary_key=True),
    Column("producer_group", Text, nullable=False),
    Column("state", Text, nullable=False, index=True),
    Column("messages", JSON, nullable=False),
    Column("born_at", DateTime(timezone=True), server_default=func.now(), nullable=False),
    Column("decided_at", DateTime(timezone=True)),
)


class Message(BaseModel):
    """A message with the fields and limits of `/half`."""

    model_config = ConfigDict(extra="forbid")

    topic: str = Field(min_length=1, max_length=255)
    key: str | None = Field(None, min_length=1, max_length=255)
    tag: str | None = Field(None, min_length=1, max_length=255)
    headers: dict[str, str] | None = None
    body: Any = None
    content_type: str | None = None
    deliver_after_s: float | None = Field(None, ge=0)


class Half(BaseModel):
    """The payload of `/half`."""

    model_config = ConfigDict(extra="forbid")

    producer_group: str = Field(min_length=1, max_length=255)
    messages: list[Message] = Field(min_length=1, max_length=100)
    transaction_id: UUID | None = None


class End(BaseModel):
    """The payload of `/end`."""

    model_config = ConfigDict(extra="forbid")

    transaction_id: UUID
    producer_group: str = Field(min_length=1, max_length=255)
    verdict: Literal["commit", "rollback"]


class Answer(BaseModel):
    """The answer of both."""

    transaction_id: UUID


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    dsn = os.environ["BENCH_DSN"]
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(dsn), pool_size=20, max_overflow=0
    )
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    api.state.engine = engine
    yield
    await engine.dispose()


api = FastAPI(lifespan=lifespan)


@api.post("/noop", status_code=201)
async def noop(half: Half) -> Answer:
    """Validate the request and answer; store nothing."""
    return Answer(transaction_id=half.transaction_id or uuid4())


@api.post("/naive/half", status_code=201)
async def naive_half(half: Half) -> Answer:
    """Insert one row in one database transaction."""
    engine: AsyncEngine = api.state.engine
    transaction_id = half.transaction_id or uuid4()
    messages = [message.model_dump(mode="json") for message in half.messages]
    async with engine.begin() as connection:
        await connection.execute(
            insert(naive).values(
                transaction_id=transaction_id, producer_group=half.producer_group, state="half", messages=messages
            )
        )
    return Answer(transaction_id=transaction_id)


@api.post("/naive/end")
async def naive_end(end: End) -> Answer:
    """Lock the row, check its state and update it in one database transaction."""
    engine: AsyncEngine = api.state.engine
    async with engine.begin() as connection:
        row = (
            await connection.execute(
                select(naive.c.state, naive.c.producer_group)
                .where(naive.c.transaction_id == end.transaction_id)
                .with_for_update()
            )
        ).one_or_none()
        if row is None or row.producer_group != end.producer_group:
            raise HTTPException(404)
        if row.state != "half":
            raise HTTPException(409)
        await connection.execute(
            update(naive)
            .where(naive.c.transaction_id == end.transaction_id)
            .values(state=end.verdict, decided_at=func.now())
        )
    return Answer(transaction_id=end.transaction_id)


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer /echo without a framework; FastAPI serves the other paths."""
    if scope["type"] != "http" or scope["path"] != "/echo":
        await api(scope, receive, send)
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})
