"""`halfnote subscriptions replay | replays | cancel-replay`: send a range of the log to a subscription again."""

from datetime import datetime
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, FromFile, Url, all_pages, call, path_of, print_json, request_of
from app.cli.errors import Refusal
from app.cli.tables import amount, moment, print_fields, print_table, short_moment, text

SubscriptionName = Annotated[str, typer.Argument(metavar="NAME", help="the subscription")]
ReplayId = Annotated[int, typer.Argument(metavar="REPLAY_ID")]
From = Annotated[str | None, typer.Option("--from", help="an offset, a time (RFC 3339), or earliest")]
Until = Annotated[str | None, typer.Option(help="the last offset or time  [default: the newest now]")]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="only these topics; repeatable")]
Keys = Annotated[list[str] | None, typer.Option("--key", help="only these keys; repeatable")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="only these tags; repeatable")]
Reason = Annotated[str | None, typer.Option(help="why; stored with the record")]
Actor = Annotated[str | None, typer.Option(envvar="USER", help="the person who replays, for the record")]


def install(app: typer.Typer) -> None:
    """Add the commands to `halfnote subscriptions`."""
    app.command("replay")(replay)
    app.command("replays")(replays)
    app.command("cancel-replay")(cancel_replay)


def replay(
    name: SubscriptionName,
    from_: From = None,
    until: Until = None,
    topic: Topics = None,
    key: Keys = None,
    tag: Tags = None,
    reason: Reason = None,
    actor: Actor = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only count what would be sent")] = False,
    file: FromFile = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Send a range of the log again with the same message ids, in parallel with live delivery."""
    content = request_of(file, until=_start_or_end(until), reason=reason, actor=actor)
    if from_ is not None:
        content["from"] = from_ if from_ == "earliest" else _start_or_end(from_)
    if "from" not in content:
        raise Refusal("Name the beginning: --from OFFSET, TIME or earliest.", code=2)
    wanted = {name: given for name, given in (("topics", topic), ("keys", key), ("tags", tag)) if given}
    if wanted:
        content["filters"] = {**(content.get("filters") or {}), **wanted}
    if dry_run:
        content["dry_run"] = True
    answer = call(url, "POST", path_of("subscriptions", name, "replay"), content=content, as_json=as_json)
    if as_json:
        print_json(answer)
        return
    if dry_run:
        count = f"{'' if answer['exact'] else 'at least '}{amount(answer['messages'])} messages"
        print(f"The offsets {answer['after'] + 1} to {answer['until']} have {count} for {name}. Nothing was sent.")
        return
    number, first, last = answer["replay_id"], answer["after"] + 1, answer["until"]
    print(f"Replay {number} of offsets {first} to {last} has begun. Its progress: halfnote subscriptions")
    print(f"  replays {name} {number}")


def replays(
    name: SubscriptionName,
    replay_id: Annotated[int | None, typer.Argument(metavar="REPLAY_ID", help="show this one")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the replays of a subscription, newest first, or show one and its results."""
    if replay_id is not None:
        shown = call(url, "GET", path_of("subscriptions", name, "replays", str(replay_id)), as_json=as_json)
        print_json(shown) if as_json else _print(shown)
        return
    found = all_pages(url, path_of("subscriptions", name, "replays"), as_json=as_json)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            str(one["replay_id"]),
            one["state"],
            f"{one['after'] + 1} to {one['until']}",
            str(one["offset"]),
            short_moment(one["created_at"]),
            _filters(one) or "",
        )
        for one in found
    ]
    print_table(("replay", "state", "offsets", "come to", "begun", "filters"), rows, whole=("replay", "state"))


def cancel_replay(name: SubscriptionName, replay_id: ReplayId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Cancel a replay. Deliveries in flight are still settled; its dead letters stay, redelivered ones too."""
    call(url, "DELETE", path_of("subscriptions", name, "replays", str(replay_id)), as_json=as_json)


def _start_or_end(value: str | None) -> dict[str, Any] | None:
    """Return an offset or a time in the API's form. Raises Refusal."""
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return {"offset": int(value)}
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise Refusal(f"`{value}` is neither an offset nor a time such as 2026-11-21T08:00:00Z.", code=2) from None
    return {"time": value}


def _filters(replay: dict[str, Any]) -> str | None:
    """Return a replay's filters as text, such as `topics order; tags new, paid`."""
    given = {name: value for name, value in (replay["filters"] or {}).items() if value}
    words = {name: ", ".join(value) if isinstance(value, list) else text(value) for name, value in given.items()}
    return "; ".join(f"{name} {value}" for name, value in words.items()) or None


def _print(replay: dict[str, Any]) -> None:
    print_fields(
        {
            "replay": f"{replay['replay_id']} of {replay['subscription']}",
            "state": replay["state"],
            "offsets": f"{replay['after'] + 1} to {replay['until']}, come to {replay['offset']}",
            "filters": _filters(replay),
            "delivered": text(replay["delivered"]),
            "in retry": text(replay["retrying"]),
            "dead letters": text(replay["dead"]),
            "asked for by": replay["actor"],
            "because": replay["reason"],
            "begun": f"{moment(replay['created_at'])} UTC",
            "ended": f"{moment(replay['ended_at'])} UTC" if replay["ended_at"] else None,
        }
    )
