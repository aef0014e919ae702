"""The overview: what needs a person now. Each figure leads to its list."""

from datetime import timedelta

from starlette.responses import Response

from app.console.page import Page
from app.console.rendering import command, link
from app.console.series_picture import KINDS, chart_of
from app.console.visit import Visit
from app.routers.stats import get_stats, several_series
from app.routers.transactions import TransactionQuery, list_of_transactions
from app.runtime.readiness import readiness
from app.schemas.stats import Stats
from app.verdicts import State

# Transactions of each state that the page names.
_NAMED = 10
# The ranges of the charts: a name, its label, the time, and the seconds of a step.
_RANGES = {
    "1h": ("1 hour", timedelta(hours=1), 60),
    "24h": ("24 hours", timedelta(days=1), 600),
    "7d": ("7 days", timedelta(days=7), 3600),
    "30d": ("30 days", timedelta(days=30), 14_400),
}
_RANGE = "24h"


async def show(visit: Visit) -> Response:
    """Show the state of the whole service."""
    runtime, caller = visit.runtime, visit.caller
    stats = _known(visit) or await get_stats(runtime, caller)
    undecided = [
        (title, await list_of_transactions(runtime, caller, TransactionQuery(state=state, limit=_NAMED)))
        for title, state, count in (
            ("Parked", State.PARKED, stats.parked.count),
            ("In doubt", State.IN_DOUBT, stats.in_doubt.count),
        )
        if count
    ]
    chosen = visit.asked.get("range", _RANGE)
    _, back, step_s = _RANGES.get(chosen, _RANGES[_RANGE])
    series = await several_series(runtime, list(KINDS), stats.at - back, None, step_s)
    if visit.wants_csv:
        steps = zip(*(one.points for one in series), strict=True)
        return visit.csv("overview", ("at", *KINDS), ((step[0].at, *(one.value for one in step)) for step in steps))
    return visit.page(
        "overview.html",
        stats=stats,
        charts=[chart_of(one) for one in series],
        ranges=[(name, label) for name, (label, _, _) in _RANGES.items()],
        chosen=chosen if chosen in _RANGES else _RANGE,
        done=_done(stats),
        undecided=undecided,
        health=await readiness(runtime),
        is_live=True,
        command_shown=command("status"),
        now=stats.at,
    )


def _known(visit: Visit) -> Stats | None:
    """Return the state that this process found last, so that one look serves a page and its stream; None: look again.

    A live page sends the id of the state that its stream named, as `Last-Event-ID`. The stream may be one of another
    process, and this process's own look be up to `state_feed.LONGEST_PAUSE_S` older.
    """
    feed, named = visit.runtime.state_feed, visit.request.headers.get("last-event-id")
    state: Stats | None = feed.state
    return state if not named or named == feed.id else None


def _done(stats: Stats) -> list[tuple[str, str, str]]:
    """Return the names of what is done, with the field of a window and the list of it."""
    since = (stats.at - timedelta(minutes=15)).isoformat(timespec="seconds")
    return [
        ("Halves", "halves", link("transactions", born_after=since)),
        ("Commits", "commits", link("transactions", state=State.COMMITTED, born_after=since)),
        ("Rollbacks", "rollbacks", link("transactions", state=State.ROLLED_BACK, born_after=since)),
        ("Deliveries", "deliveries", link("subscriptions")),
        ("Failed attempts", "failed_attempts", link("dead-letters")),
        ("Checks", "checks", link("producer-groups")),
    ]


PAGES = [Page("GET", "/console", show, ("GET", "/stats"))]
