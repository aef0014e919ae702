"""`halfnote subscriptions`: make, show, pause and delete subscriptions."""

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from app.cli import replays
from app.cli.api_client import DEFAULT_URL, AsJson, FromFile, Url, all_pages, call, path_of, print_json, request_of
from app.cli.confirmation import Yes, must_agree
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.field_changes import ChangesFile, changes_of
from app.cli.finite import finite
from app.cli.sorted_commands import SortedCommands
from app.cli.subscription_options import address_text, destination_from, print_subscription
from app.cli.tables import amount, duration, moment, print_fields, print_new_secret, print_table, text

app = typer.Typer(
    help="Subscriptions: the destinations of committed messages.", no_args_is_help=True, cls=SortedCommands
)
replays.install(app)

SubscriptionName = Annotated[str, typer.Argument(metavar="NAME", help="the subscription")]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="a topic, or a prefix and `*`; repeatable")]
Target = Annotated[
    str | None,
    typer.Option(
        "--to",
        help="a webhook's URL, pull, or amqp://..., nats://..., redis://..., kafka://host:port,host:port (kafka+tls://...)",
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="a field of the destination, such as mode, exchange, subject, stream, username or password; repeatable",
    ),
]


class SortBy(StrEnum):
    """The order of a list."""

    NAME = "name"
    LAG = "lag"
    DEAD = "dead"
    STATE = "state"
    CHANGED = "changed"


SORTED_BY: dict[SortBy, Callable[[dict[str, Any]], Any]] = {
    SortBy.NAME: lambda one: one["name"],
    SortBy.LAG: lambda one: (-one["standing"]["seconds"], one["name"]),
    SortBy.DEAD: lambda one: (-one["standing"]["dead_letters"], one["name"]),
    SortBy.CHANGED: lambda one: (-datetime.fromisoformat(one["updated_at"]).timestamp(), one["name"]),
    SortBy.STATE: lambda one: (one["state"] == "active", one["state"], one["name"]),
}
Sort = Annotated[
    SortBy,
    typer.Option(help="name; lag: the oldest first; dead: the most first; state: others first; changed: last first"),
]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="only messages with one of these tags; repeatable")]


@app.command("put")
def put(
    name: SubscriptionName,
    topic: Topics = None,
    to: Target = None,
    field: Fields = None,
    tag: Tags = None,
    secret: Annotated[
        str | None, typer.Option(help="whsec_... or whsk_...; a new webhook without one gets one, shown once")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="latest or earliest; used only when the subscription is made")
    ] = None,
    ordered: Annotated[str | None, typer.Option(help="none, or key: deliver messages of one key in order")] = None,
    on_dead: Annotated[
        str | None, typer.Option(help="with --ordered key: a dead letter releases or holds its key")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="the most workers that share it")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="requests in flight at once")] = None,
    rate: Annotated[float | None, typer.Option(callback=finite, help="the most messages a second")] = None,
    timeout_s: Annotated[float | None, typer.Option(callback=finite, help="seconds for a whole answer")] = None,
    expire_after_s: Annotated[
        float | None, typer.Option(callback=finite, help="seconds after which a waiting message becomes a dead letter")
    ] = None,
    max_backlog: Annotated[
        int | None, typer.Option(help="the most messages that wait, for each shard; the oldest become dead letters")
    ] = None,
    file: FromFile = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make or change a subscription. An omitted option gets its default; omitted secrets and passwords stay."""
    path = path_of("subscriptions", name)
    limits = {"shards": shards, "max_in_flight": max_in_flight, "rate_per_s": rate, "timeout_s": timeout_s}
    limits |= {"expire_after_s": expire_after_s, "max_backlog": max_backlog}
    content = request_of(file, topics=topic, start=start, ordered=ordered, on_dead=on_dead, **limits)
    if tag:
        content["filters"] = {**(content.get("filters") or {}), "tags": tag}
    destination = destination_from(content.get("destination"), to, field or [], secret)
    if destination is None or "type" not in destination:
        # A receiver whose URL stands in --url would get the request, with the key.
        raise Refusal(
            "Name the destination with --to, or in --file. --url is Halfnote's own address. Nothing was sent.",
            code=WRONG_USAGE,
        )
    content["destination"] = destination
    _show(call(url, "PUT", path, content=content, as_json=as_json), as_json)


@app.command("get")
def get(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a subscription: its destination, its checkpoint and lag, and its last error."""
    _show(call(url, "GET", path_of("subscriptions", name), as_json=as_json), as_json)


@app.command("list")
def list_subscriptions(sort: Sort = SortBy.NAME, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the subscriptions with their lag, the age of the oldest message that waits, dead letters and last error."""
    found = all_pages(url, "/subscriptions", as_json=as_json, standing=True)
    found.sort(key=SORTED_BY[sort])
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["name"],
            one["state"],
            *_standing(one["standing"]),
            ", ".join(one["topics"]),
            address_text(one["destination"]),
        )
        for one in found
    ]
    columns = ("subscription", "state", "lag", "oldest", "dead", "last error", "topics", "to")
    print_table(columns, rows, whole=("state", "lag", "oldest", "dead"))


def _standing(found: dict[str, Any]) -> tuple[str, str, str, str]:
    more = "" if found["exact"] else "+"
    oldest = duration(found["seconds"]) if found["messages"] else ""
    return f"{found['messages']}{more}", oldest, str(found["dead_letters"]), found["last_error"] or ""


@app.command("delete")
def delete(name: SubscriptionName, yes: Yes = False, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Delete a subscription. Deliveries in flight are still settled; its retries and dead letters are deleted."""
    path = path_of("subscriptions", name)
    if not yes:
        dead = call(url, "GET", path, as_json=as_json)["dead_letters"]
        question = (
            f"The subscription {name} will be deleted, with its checkpoint, its waiting retries and its dead letters "
            f"({amount(dead)}). Go on?"
        )
        must_agree(question, "Nothing was deleted.", yes=yes)
    call(url, "DELETE", path, as_json=as_json)


@app.command("patch")
def patch(
    name: SubscriptionName,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIELD=VALUE...",
            help="fields to change, with values as JSON or plain text, such as rate_per_s=20, rate_per_s=null or "
            "destination.url=https://...; a field that takes text, such as a password, may look like a number",
        ),
    ] = None,
    file: ChangesFile = None,
    reason: Annotated[str | None, typer.Option(help="why, for the audit")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check, and show what would change")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Change some fields of a subscription; the others stay as they are. null is a field's default."""
    query = {"reason": reason, "dry_run": "true" if dry_run else None}
    answer = call(
        url, "PATCH", path_of("subscriptions", name), query=query, content=changes_of(changes, file), as_json=as_json
    )
    _show(answer, as_json)


@app.command("recent")
def recent(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show how long the receiver took recently, and the errors of what is not delivered."""
    found = call(url, "GET", path_of("subscriptions", name, "recent"), as_json=as_json)
    if as_json:
        print_json(found)
        return
    took = found["took"]
    none = "no delivery yet"
    print_fields(
        {
            "median": none if took["p50_ms"] is None else f"{took['p50_ms']} ms",
            "p99": None if took["p99_ms"] is None else f"{took['p99_ms']} ms",
            "of": None if took["since"] is None else f"{took['count']} since {moment(took['since'])} UTC",
        }
    )
    if found["errors"]:
        print()
        rows = [(str(one["retrying"]), str(one["dead"]), one["error"]) for one in found["errors"]]
        print_table(("in retry", "dead in 1 h", "error"), rows)


@app.command("reset-breaker")
def reset_breaker(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Close the circuit breaker of a destination that is repaired, and send at full speed."""
    _show(call(url, "POST", path_of("subscriptions", name, "reset-breaker"), as_json=as_json), as_json)


@app.command("pause")
def pause(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Stop deliveries until the subscription is resumed; nothing is lost."""
    _show(call(url, "POST", path_of("subscriptions", name, "pause"), as_json=as_json), as_json)


@app.command("resume")
def resume(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Resume deliveries from the checkpoint."""
    _show(call(url, "POST", path_of("subscriptions", name, "resume"), as_json=as_json), as_json)


@app.command("test")
def send_test(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Send a test message now. Exit code 1 if it is not delivered."""
    answer = call(url, "POST", path_of("subscriptions", name, "test"), as_json=as_json)
    if as_json:
        print_json(answer)
    else:
        took = f"{answer['duration_ms']} ms"
        print_fields({**{name: text(value) for name, value in answer.items() if name != "duration_ms"}, "took": took})
    if answer["outcome"] != "delivered":
        raise typer.Exit(1)


@app.command("rotate-secret")
def rotate_secret(name: SubscriptionName, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Make a new secret, shown once; the old one signs as well for a day."""
    answer = call(url, "POST", path_of("subscriptions", name, "rotate-secret"), as_json=as_json)
    print_json(answer) if as_json else print_new_secret(answer)


def _show(subscription: dict[str, Any], as_json: bool) -> None:
    print_json(subscription) if as_json else print_subscription(subscription)
