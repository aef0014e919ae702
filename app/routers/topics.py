"""Topics: which there are and who takes them; and declaring them, for where only declared ones are taken."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from app.access import RESERVED, Caller, Role
from app.acts import act
from app.errors import Invalid, TopicReserved, TopicUnknown
from app.routers.shared import CallerDep, Name, NamePath, RuntimeDep, Strict, problems
from app.store import topics
from app.store.api_keys import note_change
from app.store.audit import record

router = APIRouter(tags=["topics"])

PAGE_MAX = 1000


class TopicShown(Strict):
    """A topic; one that no subscription takes may be a typo."""

    topic: str = Field(examples=["order"])
    first_seen_at: datetime = Field(
        description="when a half first used it, or when it was declared", examples=["2026-11-21T08:00:00Z"]
    )
    declared_at: datetime | None = Field(
        description="when it was declared; null: it is not. With HALFNOTE_TOPICS=declared only declared ones are taken",
        examples=[None],
    )
    subscriptions: list[str] = Field(
        description="the subscriptions to it, whatever their filters and state", examples=[["billing"]]
    )


class TopicPage(Strict):
    """A page of topics, by name."""

    items: list[TopicShown]
    next_cursor: str | None = Field(
        description="send it as `cursor` for the next page; null: this was the last", examples=[None]
    )


class TopicQuery(Strict):
    """Which page of topics."""

    cursor: Name | None = Field(None, description="`next_cursor` of the page before")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="topics on a page")


@router.get("/topics", summary="Topics and who takes them", responses=problems(Invalid))
async def get_topics(runtime: RuntimeDep, caller: CallerDep, query: Annotated[TopicQuery, Query()]) -> TopicPage:
    """List topics by name; to a producer's or subscriber's key those in its scope, and to a subscriber's its own
    subscriptions. Halfnote learns of a topic when a half first uses it, or when it is declared."""
    async with runtime.database.connection() as connection:
        found = await topics.page(connection, query.cursor or "", query.limit + 1, caller.topics.within)
    items = [_shown(row, caller) for row in found[: query.limit]]
    return TopicPage(items=items, next_cursor=items[-1].topic if len(found) > query.limit else None)


@router.put("/topics/{name}", status_code=204, summary="Declare a topic", responses=problems(Invalid, TopicReserved))
async def put_topic(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Take messages of this topic where HALFNOTE_TOPICS=declared refuses others. To declare one again changes nothing.

    Every process knows of it within 2 seconds. A name is one path segment: one that holds `/` cannot be declared.
    """
    if name.startswith(RESERVED):
        raise TopicReserved(f"Topics that begin with `{RESERVED}` are Halfnote's own.", field="name")
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        await note_change(connection, topics.CHANGED, now)
        if await topics.declare(connection, name, now):
            await record(connection, act(caller, "topic.declare", name), now)


@router.delete(
    "/topics/{name}", status_code=204, summary="Declare a topic no longer", responses=problems(Invalid, TopicUnknown)
)
async def delete_topic(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Refuse new messages of this topic where HALFNOTE_TOPICS=declared. What is stored of it goes on."""
    now = runtime.clock.now()
    async with runtime.database.transaction() as connection:
        await note_change(connection, topics.CHANGED, now)
        if not await topics.undeclare(connection, name):
            raise TopicUnknown(f"No topic `{name}` is declared.")
        await record(connection, act(caller, "topic.undeclare", name), now)


def _shown(row: topics.Topic, caller: Caller) -> TopicShown:
    takers = row.subscriptions
    if caller.role is Role.SUBSCRIBER:
        takers = [name for name in takers if caller.subscriptions.takes(name)]
    return TopicShown(
        topic=row.topic, first_seen_at=row.first_seen_at, declared_at=row.declared_at, subscriptions=takers
    )
