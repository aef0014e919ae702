"""Topics and their subscriptions; declaring topics for HALFNOTE_TOPICS=declared."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from app.errors import Invalid, TopicReserved, TopicUnknown
from app.operations.audit import audit_entry
from app.permissions import ALL, Caller, Role
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.schemas.fields import Name, NamePath, Strict
from app.store.admin.api_keys import note_change
from app.store.admin.audit import record
from app.store.coordinator import topics
from app.topic_patterns import RESERVED, TopicPatterns, is_reserved

router = APIRouter(tags=["topics"])

PAGE_MAX = 1000


class TopicShown(Strict):
    """A topic. A topic without a subscription may be a typo."""

    topic: str = Field(examples=["order"])
    first_seen_at: datetime = Field(
        description="when a half first used the topic, or when it was declared", examples=["2026-11-21T08:00:00Z"]
    )
    declared_at: datetime | None = Field(
        description="when it was declared; null: not declared. HALFNOTE_TOPICS=declared accepts only declared topics",
        examples=[None],
    )
    subscriptions: list[str] = Field(
        description="the subscriptions to the topic, with any filters and in any state", examples=[["billing"]]
    )


class TopicPage(Strict):
    """A page of topics, by name."""

    items: list[TopicShown]
    next_cursor: str | None = Field(
        description="send it as `cursor` for the next page; null: this was the last", examples=[None]
    )


class TopicQuery(Strict):
    """A page of topics."""

    cursor: Name | None = Field(None, description="`next_cursor` of the previous page")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="topics on a page")


@router.get("/topics", summary="List topics and their subscriptions", responses=problems(Invalid))
async def get_topics(runtime: RuntimeDep, caller: CallerDep, query: Annotated[TopicQuery, Query()]) -> TopicPage:
    """List topics by name.

    A producer's or subscriber's key sees the topics in its scope. A subscriber's key sees only its own subscriptions. A
    topic exists once a half has used it, or once it is declared.
    """
    async with runtime.request_pool.connection() as connection:
        found = await topics.page(connection, query.cursor or "", query.limit + 1, _within(caller))
    items = [_shown(row, caller) for row in found[: query.limit]]
    return TopicPage(items=items, next_cursor=items[-1].topic if len(found) > query.limit else None)


@router.put("/topics/{name}", status_code=204, summary="Declare a topic", responses=problems(Invalid, TopicReserved))
async def put_topic(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Accept messages of this topic where HALFNOTE_TOPICS=declared refuses others. Declaring it again changes nothing.

    Every process accepts the topic within 2 seconds. A name is one path segment, so a name with `/` cannot be declared.
    """
    if is_reserved(name):
        raise TopicReserved(
            f"Topics that begin with `{RESERVED}` are reserved for operational messages. Choose another name.",
            field="name",
        )
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        await note_change(connection, topics.CHANGED, now)
        if await topics.declare(connection, name, now):
            await record(connection, audit_entry(caller, "topic.declare", name), now)


@router.delete(
    "/topics/{name}", status_code=204, summary="Remove a topic's declaration", responses=problems(Invalid, TopicUnknown)
)
async def delete_topic(name: NamePath, runtime: RuntimeDep, caller: CallerDep) -> None:
    """Refuse new messages of this topic where HALFNOTE_TOPICS=declared. Stored messages are still delivered."""
    now = runtime.clock.now()
    async with runtime.request_pool.transaction() as connection:
        await note_change(connection, topics.CHANGED, now)
        if not await topics.undeclare(connection, name):
            raise TopicUnknown(f"Topic `{name}` is not declared.")
        await record(connection, audit_entry(caller, "topic.undeclare", name), now)


def _within(caller: Caller) -> TopicPatterns | None:
    """Return what of the topics a key may see (None: all); `*` does not match reserved ones."""
    return None if caller.topics is ALL else caller.topics.topic_patterns


def _shown(row: topics.Topic, caller: Caller) -> TopicShown:
    takers = row.subscriptions
    if caller.role is Role.SUBSCRIBER:
        takers = [name for name in takers if caller.subscriptions.takes(name)]
    return TopicShown(
        topic=row.topic, first_seen_at=row.first_seen_at, declared_at=row.declared_at, subscriptions=takers
    )
