"""`halfnote dead-letters`: list, count, show, redeliver and drop dead letters."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, PAGE_MAX, AsJson, Url, call, list_items, path_of, print_json
from app.cli.confirmation import must_agree
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.since import Since, time_of
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import age, amount, json_text, moment, print_fields, print_table, share, text

app = typer.Typer(
    help="Dead letters: messages that delivery gave up. Redeliver or drop them.",
    no_args_is_help=True,
    cls=SortedCommands,
)

# The API's limit: dead letters that one call moves.
MOVED_MAX = 10_000

SubscriptionName = Annotated[str, typer.Argument(metavar="SUBSCRIPTION")]
MessageId = Annotated[str, typer.Argument(metavar="MESSAGE_ID")]
MessageIds = Annotated[list[str] | None, typer.Argument(metavar="[MESSAGE_ID]...", help="or a filter")]
Of = Annotated[str | None, typer.Option("--subscription", help="of this subscription")]
Topic = Annotated[str | None, typer.Option(help="of this topic")]
Key = Annotated[str | None, typer.Option(help="of this key")]
Because = Annotated[str | None, typer.Option("--because", help="dead for this reason, such as retries_exhausted")]
OfError = Annotated[str | None, typer.Option("--error", help="of this error, as `dead-letters groups` shows it")]
DiedAfter = Annotated[str | None, typer.Option(help="died at this time or later (RFC 3339)")]
DiedBefore = Annotated[str | None, typer.Option(help="died before this time (RFC 3339)")]
Replay = Annotated[int | None, typer.Option(help="with MESSAGE_IDs: the replay that they died in")]
Reason = Annotated[str | None, typer.Option(help="why; stored with the record")]
Actor = Annotated[str | None, typer.Option(envvar="USER", help="the person who acts, for the record")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="with a filter: only list the dead letters")]
Yes = Annotated[bool, typer.Option("--yes", help="with a filter: do not ask for confirmation")]


class DeadLetterOrder(StrEnum):
    """The order of the groups."""

    COUNT = "count"
    LAST = "last"
    FIRST = "first"
    SUBSCRIPTION = "subscription"


@app.command("list")
def list_dead_letters(
    subscription: Of = None,
    topic: Topic = None,
    key: Key = None,
    because: Because = None,
    error: OfError = None,
    since: Since = None,
    died_after: DiedAfter = None,
    died_before: DiedBefore = None,
    limit: Annotated[int, typer.Option(help="the most to list")] = 50,
    cursor: Annotated[str | None, typer.Option(help="the cursor that the previous list ended with")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List dead letters, newest first, and how many there are."""
    after = time_of(since, died_after, "--died-after")
    query = {**_filter(subscription, topic, key, because, error, after, died_before), "count": True, "cursor": cursor}
    found = list_items(url, "/dead-letters", query, limit, as_json=as_json)
    if as_json:
        print_json(found)
        return
    now = datetime.now(UTC)
    rows = [(one["message_id"], age(one["died_at"], now), _about(one)) for one in found["items"]]
    print_table(("message", "died", "subscription: why"), rows, whole=("message", "died"))
    if found["next_cursor"]:
        print(f"\n{share(found)} There may be more:\n--cursor {found['next_cursor']}")


@app.command("groups")
def groups(
    subscription: Of = None,
    topic: Topic = None,
    key: Key = None,
    because: Because = None,
    error: OfError = None,
    since: Since = None,
    died_after: DiedAfter = None,
    died_before: DiedBefore = None,
    sort: Annotated[
        DeadLetterOrder, typer.Option(help="count: the largest first; last, first: by death; subscription")
    ] = (DeadLetterOrder.COUNT),
    limit: Annotated[int, typer.Option(min=1, max=PAGE_MAX, help="the most groups")] = 50,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Count dead letters by subscription, reason and error, the most frequent first."""
    after = time_of(since, died_after, "--died-after")
    query = {
        **_filter(subscription, topic, key, because, error, after, died_before),
        "sort": sort.value,
        "limit": limit,
    }
    found = call(url, "GET", "/dead-letters/groups", query=query, as_json=as_json)
    if as_json:
        print_json(found)
        return
    now = datetime.now(UTC)
    rows = [
        (amount(one["count"]), age(one["first_at"], now), age(one["last_at"], now), one["subscription"], _why(one))
        for one in found["items"]
    ]
    print_table(("count", "first", "last", "subscription", "why"), rows, whole=("count", "first", "last"))
    if found["groups"] > len(rows):
        print(f"\n{amount(found['groups'] - len(rows))} groups are left out: --limit shows more.")
    if not found["complete"]:
        print(f"\nOnly the newest {amount(found['looked_at'])} were counted: name a --subscription or --since.")


@app.command("show")
def show(
    subscription: SubscriptionName,
    message_id: MessageId,
    replay: Annotated[int | None, typer.Option(help="the replay it died in")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show a dead letter: its reason, its last answer, and its message."""
    path = path_of("dead-letters", subscription, message_id)
    letter = call(url, "GET", path, query={"replay": replay}, as_json=as_json)
    if as_json:
        print_json(letter)
        return
    tries = f"{letter['attempts']}, the first {moment(letter['first_at'])} UTC" if "first_at" in letter else None
    print_fields(
        {
            "message": letter["message_id"],
            "subscription": letter["subscription"],
            "replay": text(letter.get("replay")),
            "group": letter["producer_group"],
            "topic": letter["topic"],
            "key": letter["key"],
            "tag": letter["tag"],
            "headers": text(letter["headers"] or None),
            "offset": text(letter["offset"]),
            "died": f"{moment(letter['died_at'])} UTC",
            "because": letter["reason"],
            "tries": tries or text(letter["attempts"]),
            "last error": letter.get("error"),
            "last answer": letter.get("response"),
            "redelivered": "\n".join(map(_earlier, letter["redelivered"])) or None,
            "body": json_text(letter["body"]) if "body" in letter else None,
            "body (base64)": letter.get("body_base64"),
        }
    )


@app.command("redeliver")
def redeliver(
    message_ids: MessageIds = None,
    subscription: Of = None,
    topic: Topic = None,
    key: Key = None,
    because: Because = None,
    error: OfError = None,
    since: Since = None,
    died_after: DiedAfter = None,
    died_before: DiedBefore = None,
    replay: Replay = None,
    reason: Reason = None,
    actor: Actor = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Redeliver dead letters: MESSAGE_IDs of a --subscription, or all that match a filter."""
    after = time_of(since, died_after, "--died-after")
    filters = _filter(subscription, topic, key, because, error, after, died_before)
    wanted = _selection(message_ids, filters, replay, dry_run) | _given(reason=reason, actor=actor)

    def act(content: dict[str, Any], *, as_json: bool = as_json) -> Any:
        return call(url, "POST", "/dead-letters/redeliver", content=content, as_json=as_json)

    _finish(*_act(act, wanted, "redelivered", dry_run=dry_run, ask=not yes), "redelivered", as_json)


@app.command("drop")
def drop(
    message_ids: MessageIds = None,
    subscription: Of = None,
    topic: Topic = None,
    key: Key = None,
    because: Because = None,
    error: OfError = None,
    since: Since = None,
    died_after: DiedAfter = None,
    died_before: DiedBefore = None,
    replay: Replay = None,
    reason: Reason = None,
    actor: Actor = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Drop dead letters for good: MESSAGE_IDs of a --subscription, or all that match a filter."""
    after = time_of(since, died_after, "--died-after")
    filters = _filter(subscription, topic, key, because, error, after, died_before)
    wanted = _selection(message_ids, filters, replay, dry_run) | _given(reason=reason, actor=actor)

    def act(content: dict[str, Any], *, as_json: bool = as_json) -> Any:
        return call(url, "DELETE", "/dead-letters", content=content, as_json=as_json)

    _finish(*_act(act, wanted, "dropped", dry_run=dry_run, ask=not yes), "dropped", as_json)


def _filter(
    subscription: str | None,
    topic: str | None,
    key: str | None,
    because: str | None,
    error: str | None,
    died_after: str | None,
    died_before: str | None,
) -> dict[str, Any]:
    return _given(
        subscription=subscription,
        topic=topic,
        key=key,
        reason=because,
        error=error,
        died_after=died_after,
        died_before=died_before,
    )


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _selection(
    message_ids: list[str] | None, filters: dict[str, Any], replay: int | None, dry_run: bool
) -> dict[str, Any]:
    """Return a request's selection. Raises Refusal unless it is either ids or a filter; a dry run is of a filter."""
    if not message_ids:
        if not filters or replay is not None:
            raise Refusal("Name MESSAGE_IDs and their --subscription, or a filter such as --subscription.", code=2)
        return {"filter": filters}
    if dry_run:
        raise Refusal(
            "--dry-run goes with a filter, not with MESSAGE_IDs. Nothing was done. To see one first: "
            "halfnote dead-letters show",
            code=WRONG_USAGE,
        )
    if set(filters) != {"subscription"}:
        raise Refusal("MESSAGE_IDs go with --subscription and with no other filter.", code=2)
    return {"ids": [{**filters, "message_id": one, **_given(replay=replay)} for one in message_ids]}


def _act(
    act: Callable[..., Any], wanted: dict[str, Any], done: str, *, dry_run: bool, ask: bool
) -> tuple[dict[str, Any], Refusal | None]:
    """Act on ids in one call; with a filter, first count the matches and ask, then act in as many calls as needed.

    Return what was done, and the refusal of a call after others that did something. Raises Refusal if nothing was done,
    also if the person declines.
    """
    if "ids" in wanted:
        answer: dict[str, Any] = act(wanted)
        return answer, None
    preview: dict[str, Any] = act({**wanted, "dry_run": True, "at_most": PAGE_MAX})
    if dry_run:
        return preview, None
    if not preview["left"]:
        return {**{name: preview[name] for name in preview if name != "died_before"}, "dry_run": False}, None
    must_agree(f"{_many(preview['left'])} will be {done}. Go on?", f"Nothing was {done}.", yes=not ask)
    # Those that the preview counted: what dies meanwhile was not agreed to.
    counted = {**wanted, "filter": {**wanted["filter"], "died_before": preview["died_before"]}}
    total, whole = preview["left"], {**preview, "dry_run": False, done: 0, "ids": []}
    failed = None
    while whole[done] < total:
        part = {**counted, "dry_run": False, "at_most": min(total - whole[done], MOVED_MAX)}
        if not whole[done]:
            answer = act(part)
        else:
            try:
                answer = act(part, as_json=False)
            except Refusal as refused:
                failed = refused
                break
        ids, count = whole["ids"] + answer["ids"], whole[done] + answer[done]
        whole |= {**answer, "ids": ids, done: count}
        if "next_cursor" in answer:
            counted["cursor"] = answer["next_cursor"]
        elif "left_exact" in answer or not answer[done]:
            break
    del whole["died_before"]
    whole.pop("next_cursor", None)
    # What died meanwhile counts too. A failure of this look loses nothing.
    with suppress(Refusal):
        left = act({**wanted, "dry_run": True, "at_most": 1}, as_json=False)
        whole |= {"left": left["left"], "left_exact": _is_exact(left)}
    return whole, failed


def _finish(answer: dict[str, Any], failed: Refusal | None, done: str, as_json: bool) -> None:
    """Print what was done. Raises Refusal if a later call failed: the rest still meets the filter."""
    if failed is not None and as_json:
        answer = {**answer, "problem": failed.problem or {"detail": str(failed)}}
    print_json(answer) if as_json else _print_answer(answer, done)
    if failed is not None:
        raise Refusal(f"Not all were {done}. Repeat the command for the rest. {failed}", code=failed.code)


def _print_answer(answer: dict[str, Any], done: str) -> None:
    if answer["dry_run"]:
        for one in answer["ids"]:
            print(f"{one['message_id']} {one['subscription']}{_of_replay(one)}")
        print(f"{_many(answer['left'])} would be {done}.")
        _print_inexact(answer)
        return
    print(f"{_many(answer[done])} {'was' if answer[done] == 1 else 'were'} {done}.")
    if answer["not_found"]:
        print(f"{answer['not_found']} not found: redelivered or dropped before, or never dead.")
    if answer["left"]:
        print(f"{_many(answer['left'])} still {'meets' if answer['left'] == 1 else 'meet'} the filter.")
    _print_inexact(answer)
    for one in answer.get("waiting", ()):
        print(f"{one['subscription']} is {one['state']}: they go out when it is resumed.")


def _print_inexact(answer: dict[str, Any]) -> None:
    if not _is_exact(answer):
        print("There may be more: not all were counted.")


def _is_exact(answer: dict[str, Any]) -> bool:
    # An older service during an upgrade does not say it, and counts all.
    return bool(answer.get("left_exact", True))


def _many(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


def _about(one: dict[str, Any]) -> str:
    """Return a dead letter's subscription, reason and error."""
    error = f" ({one['error']})" if one.get("error") else ""
    return f"{one['subscription']}{_of_replay(one)}: {one['reason']}{error}"


def _why(group: dict[str, Any]) -> str:
    return group["reason"] if group["newest"] is None else f"{group['reason']} ({group['error']})"


def _of_replay(one: dict[str, Any]) -> str:
    return f", replay {one['replay']}" if "replay" in one else ""


def _earlier(one: dict[str, Any]) -> str:
    by = f" by {one['actor']}" if one.get("actor") else ""
    why = f": {one['reason']}" if one.get("reason") else ""
    return f"{moment(one['at'])} UTC{by}{why}"
