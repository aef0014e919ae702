"""`halfnote audit`: list the actions of people."""

import json
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, print_json
from app.cli.since import Since, time_of
from app.cli.tables import moment, print_table

Actor = Annotated[str | None, typer.Option(help="by this person: a key's name, or a user of the command line")]
What = Annotated[str | None, typer.Option(help="of this kind, such as transaction.verdict")]
Target = Annotated[str | None, typer.Option(help="on this target: a name or an id")]
After = Annotated[str | None, typer.Option(help="at this time or later (RFC 3339)")]
Before = Annotated[str | None, typer.Option(help="before this time (RFC 3339)")]
Limit = Annotated[int, typer.Option(help="the most to list, newest first")]


def audit(
    actor: Actor = None,
    what: What = None,
    target: Target = None,
    since: Since = None,
    after: After = None,
    before: Before = None,
    limit: Limit = 100,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the actions of people, newest first."""
    at_or_later = time_of(since, after, "--after")
    query = {"actor": actor, "what": what, "target": target, "after": at_or_later, "before": before, "limit": limit}
    answer = call(url, "GET", "/audit", query=query, as_json=as_json)
    if as_json:
        print_json(answer)
        return
    print_table(("at (utc)", "who", "did", "to", "asking for"), [_row(one) for one in answer["items"]])


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    detail = json.dumps(one["detail"], ensure_ascii=False) if one["detail"] else ""
    return moment(one["at"]) or "", one["actor"] or "(auth off)", one["what"], one["target"] or "", detail
