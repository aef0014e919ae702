"""`halfnote topics`: list, declare and undeclare topics."""

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, all_pages, call, path_of, print_json
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import age, moment, print_table

app = typer.Typer(help="Topics: their subscriptions, and which are declared.", no_args_is_help=True, cls=SortedCommands)

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="topics")]


class TopicOrder(StrEnum):
    """The order of the list."""

    NAME = "name"
    MESSAGES = "messages"
    FIRST_SEEN = "first_seen"


@app.command("list")
def list_topics(
    sort: Annotated[TopicOrder, typer.Option(help="name; messages: the most first; first_seen: the newest first")] = (
        TopicOrder.NAME
    ),
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the topics that were used or declared, with their share of the last 10,000 messages."""
    topics = all_pages(url, "/topics", as_json=as_json, traffic=True, sort=sort.value)
    if as_json:
        print_json(topics)
        return
    now = datetime.now(UTC)
    rows = [
        (
            one["topic"],
            *_traffic(one["traffic"], now),
            moment(one["declared_at"]) or "no",
            ", ".join(one["subscriptions"]) or "none",
        )
        for one in topics
    ]
    columns = ("topic", "per s", "last message", "unrouted", "declared", "taken by")
    print_table(columns, rows, whole=("per s", "last message", "unrouted"))


def _traffic(found: dict[str, Any], now: datetime) -> tuple[str, str, str]:
    return f"{found['per_s']:.3g}", age(found["last_at"], now) if found["last_at"] else "", str(found["unrouted"])


@app.command("declare")
def declare(names: Names, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Declare topics: with HALFNOTE_TOPICS=declared only declared topics take messages."""
    for name in names:
        call(url, "PUT", path_of("topics", name), as_json=as_json)


@app.command("undeclare")
def undeclare(names: Names, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Undeclare topics: with HALFNOTE_TOPICS=declared they take no new messages."""
    for name in names:
        call(url, "DELETE", path_of("topics", name), as_json=as_json)
