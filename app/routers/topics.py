"""Topics and their subscriptions; declaring topics for HALFNOTE_TOPICS=declared."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field

from app.database.connection import Connection
from app.errors import Invalid, TopicReserved, TopicUnknown
from app.operations.audit import audit_entry
from app.permissions import ALL, Caller, Role
from app.routers.dependencies import CallerDep, RuntimeDep, problems
from app.routers.list_order import next_rank, rank_of
from app.schemas.fields import COUNT, Name, NamePath, Strict
from app.schemas.totals import COUNTED_MOST, TOTAL, TotalShown, total_of
from app.store.admin.api_keys import note_change
from app.store.admin.audit import record
from app.store.coordinator import topics
from app.store.coordinator.topic_rankings import TopicOrder, count_topics, ranked_topics
from app.store.coordinator.topic_traffic import TopicTraffic, traffic_of
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


class TopicTrafficShown(Strict):
    """The messages of a topic among the last 10,000 of the log."""

    messages: int = Field(description="committed messages")
    per_s: float = Field(description="per second, since the first of the 10,000")
    last_at: datetime | None = Field(description="when the last was committed; null: it is not among the 10,000")
    unrouted: int = Field(description="those that no subscription's topics take; tags and headers are ignored")


class TopicListed(TopicShown):
    """A topic in a list."""

    traffic: TopicTrafficShown | None = Field(None, description="null unless it was asked for")


class TopicPage(Strict):
    """A page of topics."""

    items: list[TopicListed]
    next_cursor: str | None = Field(
        description="send it as `cursor` for the next page; null: this was the last", examples=[None]
    )
    total: TotalShown | None = Field(None, description=TOTAL)


class TopicQuery(Strict):
    """A page of topics."""

    cursor: Name | None = Field(None, description="`next_cursor` of the previous page, with the same order")
    limit: int = Field(100, ge=1, le=PAGE_MAX, description="topics on a page")
    sort: Literal["name", TopicOrder] = Field(
        "name",
        description="`messages`: the most among the last 10,000 messages first; `first_seen`: the newest topic first. "
        "Only `name` is stable over pages while these change",
    )
    count: bool = Field(False, description=COUNT)
    traffic: bool = Field(False, description="true: each topic has `traffic`, its last messages; this costs more")


@router.get("/topics", summary="List topics and their subscriptions", responses=problems(Invalid))
async def get_topics(runtime: RuntimeDep, caller: CallerDep, query: Annotated[TopicQuery, Query()]) -> TopicPage:
    """List topics, one page at a time.

    A producer's or subscriber's key sees the topics in its scope. A subscriber's key sees only its own subscriptions. A
    topic exists once a half has used it, or once it is declared. With `traffic` each has its last messages.
    With `count` the answer has their number.
    """
    now, within = runtime.clock.now(), _within(caller)
    async with runtime.request_pool.connection() as connection:
        page, cursor = await _page(connection, query, within)
        total = await count_topics(connection, COUNTED_MOST + 1, within) if query.count else None
        traffic, since = await traffic_of(connection, [row.topic for row in page]) if query.traffic else (None, None)
    items = [
        TopicListed(**_shown(row, caller).model_dump(), traffic=_traffic(row, traffic, since, now)) for row in page
    ]
    return TopicPage(items=items, next_cursor=cursor, total=None if total is None else total_of(total))


async def _page(
    connection: Connection, query: TopicQuery, within: TopicPatterns | None
) -> tuple[list[topics.Topic], str | None]:
    """Return the topics of a page, and the cursor of the next one."""
    if query.sort == "name":
        found = await topics.page(connection, query.cursor or "", query.limit + 1, within)
        page = found[: query.limit]
        return page, page[-1].topic if len(found) > query.limit else None
    rank = rank_of(query.cursor)
    names = await ranked_topics(connection, query.sort, rank, query.limit + 1, within)
    return await topics.of_names(connection, names[: query.limit]), next_rank(rank, names, query.limit)


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


def _traffic(
    row: topics.Topic, traffic: Mapping[str, TopicTraffic] | None, since: datetime | None, now: datetime
) -> TopicTrafficShown | None:
    if traffic is None:
        return None
    found = traffic.get(row.topic)
    if found is None or since is None:
        return TopicTrafficShown(messages=0, per_s=0.0, last_at=None, unrouted=0)
    # In the first second no rate is known.
    over_s = max(1.0, (now - since).total_seconds())
    unrouted = 0 if row.subscriptions or is_reserved(row.topic) else found.messages
    return TopicTrafficShown(
        messages=found.messages, per_s=found.messages / over_s, last_at=found.last_at, unrouted=unrouted
    )
