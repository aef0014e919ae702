"""`GET /topics`: which topics there are and who takes them."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field

from app.errors import Invalid
from app.routers.shared import Name, RuntimeDep, Strict, problems
from app.store import topics

router = APIRouter(tags=["topics"])

PAGE_MAX = 1000


class TopicShown(Strict):
    """A topic; one that no subscription takes may be a typo."""

    topic: str = Field(examples=["order"])
    first_seen_at: datetime = Field(description="when a half first used it", examples=["2026-11-21T08:00:00Z"])
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
async def get_topics(runtime: RuntimeDep, query: Annotated[TopicQuery, Query()]) -> TopicPage:
    """List topics by name. Halfnote learns of a topic when a half first uses it."""
    async with runtime.database.connection() as connection:
        found = await topics.page(connection, query.cursor or "", query.limit + 1)
    items = [
        TopicShown(topic=row.topic, first_seen_at=row.first_seen_at, subscriptions=row.subscriptions)
        for row in found[: query.limit]
    ]
    return TopicPage(items=items, next_cursor=items[-1].topic if len(found) > query.limit else None)
