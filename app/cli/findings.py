"""`halfnote findings`: list and show findings of the nightly proof."""

from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, list_items, path_of, print_json
from app.cli.given_options import refuse_before_command
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import moment, print_fields, print_table, text

app = typer.Typer(help="Findings of the nightly proof. Without a command: list the open ones.", cls=SortedCommands)

FindingId = Annotated[int, typer.Argument(metavar="FINDING_ID")]
Day = Annotated[str | None, typer.Option(help="of this day (YYYY-MM-DD)")]
Kind = Annotated[str | None, typer.Option(help="of this kind, such as parked")]
StateName = Annotated[str | None, typer.Option("--state", help="open, resolved or all  [default: open]")]
Limit = Annotated[int, typer.Option(help="the most to list")]
Cursor = Annotated[str | None, typer.Option(help="the cursor that the previous list ended with")]


@app.callback(invoke_without_command=True)
def findings(
    context: typer.Context,
    day: Day = None,
    kind: Kind = None,
    state: StateName = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Findings of the nightly proof. Without a command: list the open ones."""
    if context.invoked_subcommand is not None:
        refuse_before_command(context)
        return
    list_findings(day, kind, state, limit, cursor, url, as_json)


@app.command("list")
def list_findings(
    day: Day = None,
    kind: Kind = None,
    state: StateName = None,
    limit: Limit = 50,
    cursor: Cursor = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List findings, newest day first."""
    query = {"day": day, "kind": kind, "state": {"all": None, None: "open"}.get(state, state), "cursor": cursor}
    found = list_items(url, "/findings", query, limit, as_json=as_json)
    if as_json:
        print_json(found)
        return
    rows = [
        (str(one["finding_id"]), one["day"], f"{one['kind']}{_state(one)}\n{one['subject']}") for one in found["items"]
    ]
    print_table(("id", "day", "kind, subject"), rows, whole=("id", "day"))
    if found["next_cursor"]:
        print(f"\nThere may be more:\n--cursor {found['next_cursor']}")


@app.command("show")
def show(finding_id: FindingId, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show a finding: its subject, its details, and the page that explains it."""
    one = call(url, "GET", path_of("findings", str(finding_id)), as_json=as_json)
    if as_json:
        print_json(one)
        return
    shown = {
        "finding": str(one["finding_id"]),
        "day": one["day"],
        "kind": one["kind"],
        "subject": one["subject"],
        "transaction": one.get("transaction_id"),
        "message": one.get("message_id"),
        "subscription": one.get("subscription"),
        "group": one.get("producer_group"),
    }
    shown |= {name: text(value) for name, value in one["detail"].items() if name not in shown}
    shown |= {
        "first seen": f"{moment(one['first_seen_at'])} UTC, by run {one['first_run']}",
        "last seen": f"{moment(one['last_seen_at'])} UTC, by run {one['last_run']}",
        "resolved": _resolved(one),
        "what it means": f"{url}{one['docs']}",
    }
    print_fields(shown)


def _resolved(one: dict[str, Any]) -> str | None:
    if "resolved_at" not in one:
        return None
    how = f"by run {one['resolved_run']}" if "resolved_run" in one else "when its day was removed"
    return f"{moment(one['resolved_at'])} UTC, {how}"


def _state(one: dict[str, Any]) -> str:
    return " (resolved)" if one["state"] == "resolved" else ""
