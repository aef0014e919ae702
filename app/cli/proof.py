"""`halfnote proof`: what the nightly proof says of each day."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, print_json
from app.cli.sorted_commands import SortedCommands
from app.cli.tables import age, print_fields, print_table

app = typer.Typer(help="The nightly proof: its days and its runs.", no_args_is_help=True, cls=SortedCommands)


@app.command("list")
def list_days(
    limit: Annotated[int, typer.Option(help="the most days, newest first")] = 30,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """List the days that the proof has read, with their findings, after the result of the last run."""
    found = call(url, "GET", "/reconciliation", query={"limit": limit}, as_json=as_json)
    if as_json:
        print_json(found)
        return
    now = datetime.now(UTC)
    print_fields({"last run": _run(found["run"], now), "last proved": _ago(found["proved_at"], now)})
    print()
    rows = [
        (one["day"], one["state"], _findings(one["found"]), age(one["reconciled_at"], now), str(one["run_id"]))
        for one in found["days"]["items"]
    ]
    print_table(("day", "state", "findings", "read", "run"), rows, whole=("day", "state"))


def _run(run: dict[str, Any] | None, now: datetime) -> str:
    if run is None:
        return "none yet; `halfnote reconcile` makes one"
    why = f": {run['error']}" if run.get("error") else ""
    return f"{run['run_id']} {run['state']} {age(run['ended_at'], now)}{why}"


def _ago(at: str | None, now: datetime) -> str:
    return "never" if at is None else age(at, now)


def _findings(found: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(found.items()) if count) or "none"
