"""The list of subscriptions, and one with its lag, its breaker, its shards and its replays."""

from functools import partial
from typing import Any

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command
from app.console.visit import Visit
from app.routers.recent_deliveries import get_recent
from app.routers.replays import list_replays
from app.routers.subscriptions import SubscriptionQuery, get_subscription, list_subscriptions
from app.schemas.replays import ReplayPage
from app.schemas.subscriptions import SubscriptionListed, SubscriptionStanding

_COLUMNS = (
    "name",
    "state",
    "state_reason",
    "waiting",
    "oldest_s",
    "dead_letters",
    "last_error",
    "topics",
    "destination",
    "ordered",
    "shards",
    "rate_per_s",
    "updated_at",
)


async def show_list(visit: Visit) -> Response:
    """Show a page of subscriptions."""
    query = visit.list_query(SubscriptionQuery, standing=True, count=True)
    read = partial(list_subscriptions, visit.runtime, visit.caller)
    if visit.wants_csv:
        return await visit.csv_of_list(
            "subscriptions",
            _COLUMNS,
            query,
            read,
            topics=lambda one: " ".join(one.topics),
            destination=address_of,
            waiting=lambda one: standing_of(one).messages,
            oldest_s=lambda one: standing_of(one).seconds,
            dead_letters=lambda one: standing_of(one).dead_letters,
            last_error=lambda one: standing_of(one).last_error,
        )
    found = await read(query)
    return visit.page(
        "subscriptions.html",
        rows=[(one, address_of(one)) for one in found.items],
        next_cursor=found.next_cursor,
        is_live=True,
        sort=query.sort,
        total=found.total,
        command_shown=command("subscriptions", "list", sort=None if query.sort == "name" else query.sort),
        now=visit.runtime.clock.now(),
    )


async def show_one(visit: Visit) -> Response:
    """Show a subscription and its state."""
    name = visit.path["name"]
    shown = await get_subscription(name, visit.runtime, visit.caller)
    if visit.wants_csv:
        return visit.csv_of("subscription", ("shard", "offset", "holder", "held_since", "held_until"), shown.places)
    recent = await get_recent(name, visit.runtime, visit.caller)
    replays = await list_replays(name, visit.runtime, visit.caller, ReplayPage(limit=10))
    return visit.page(
        "subscription.html",
        shown=shown,
        address=address_of(shown),
        destination=shown.destination.model_dump(mode="json", exclude_none=True),
        recent=recent,
        replays=replays.items,
        is_live=True,
        command_shown=command("subscriptions", "get", name),
        now=visit.runtime.clock.now(),
    )


def standing_of(shown: SubscriptionListed) -> SubscriptionStanding:
    """Return the state of a subscription of a list that was asked for states."""
    assert shown.standing is not None
    return shown.standing


def address_of(shown: Any) -> str:
    """Return where a subscription sends: the type and the address."""
    fields = shown.destination.model_dump(mode="json")
    return f"{fields['type']} {fields.get('url') or fields.get('bootstrap') or ''}".strip()


PAGES = [
    Page("GET", "/console/subscriptions", show_list, ("GET", "/subscriptions")),
    Page("GET", "/console/subscriptions/{name}", show_one, ("GET", "/subscriptions/{name}")),
]
