"""`halfnote certificate`: certificates of days: list, show one, verify one without a database, make a key."""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.errors import Refusal
from app.cli.reconcile import PASSED_ON, PYTHON
from app.cli.sorted_commands import SortedCommands
from app.cli.spark_program import follow
from app.cli.tables import print_table

app = typer.Typer(
    help="Certificates of final days: list, show, verify, and make a signing key.",
    no_args_is_help=True,
    cls=SortedCommands,
)

Day = Annotated[str, typer.Argument(help="the day, YYYY-MM-DD")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="the most days to list")]
BROKEN = 3
PAGE = 100
KEY_SHOWN = 16
Out = Annotated[Path | None, typer.Option(help="write the certificate to this file instead")]


@app.command("list")
def list_certificates(limit: Limit = 30, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the newest days with state, certificate number, signing key, and whether the chain is intact.

    Only `verify` verifies signatures. Exit codes: 0 intact, 1 it failed, 2 wrong usage, 3 a chain is broken.
    """
    days = call(url, "GET", "/reconciliation", query={"limit": limit}, as_json=as_json)["days"]["items"]
    certificates = _certificates(url, min((day["day"] for day in days), default=None))
    listed = [_listed(day, certificates.get(day["day"])) for day in days]
    if as_json:
        print_json({"items": listed})
    else:
        columns = ("day", "state", "certificate", "key", "chain")
        print_table(columns, [_row(one) for one in listed], whole=columns)
    if any(one["chain"] == "broken" for one in listed):
        raise SystemExit(BROKEN)


def _certificates(url: str, since: str | None) -> dict[str, Any]:
    """Return the certificates of the days since one, by day."""
    found: dict[str, Any] = {}
    query: dict[str, Any] = {"since": since, "limit": PAGE}
    while since is not None:
        page = call(url, "GET", "/reconciliation/certificates", query=query)
        found |= {one["day"]: one for one in page["items"]}
        if page["next_cursor"] is None:
            break
        query["before"] = page["next_cursor"]
    return found


def _listed(day: dict[str, Any], found: dict[str, Any] | None) -> dict[str, Any]:
    """Return a day of the list. A run after the certificate may have stored another state of the day."""
    shown = {name: found and found[name] for name in ("sequence", "public_key", "chain")}
    return {"day": day["day"], "state": day["state"], **shown}


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    if one["sequence"] is None:
        return one["day"], one["state"], "none", "", ""
    key = one["public_key"][:KEY_SHOWN] if one["public_key"] else "unsigned"
    return one["day"], one["state"], str(one["sequence"]), key, one["chain"]


def _fetched(url: str, day: str) -> Any:
    return call(url, "GET", path_of("reconciliation", day, "certificate"))


def _text_of(document: Any) -> str:
    """Return a certificate in canonical form, which the answer has and the signature covers."""
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"


@app.command("show")
def show(day: Day, out: Out = None, url: Url = DEFAULT_URL) -> None:
    """Print the certificate of a day, byte for byte, for `halfnote certificate verify`."""
    document = _text_of(_fetched(url, day))
    if out is None:
        print(document, end="")
        return
    try:
        out.write_bytes(document.encode())
    except OSError as error:
        raise Refusal(f"{out} cannot be written: {error.strerror}.") from None


@app.command("verify", context_settings=PASSED_ON)
def verify(context: typer.Context) -> None:
    """Verify the certificate in a FILE without Halfnote's database; --help lists the options.

    Exit codes: 0 intact, 1 it failed, 2 wrong usage, 3 something differs.
    """
    _run("verify", context)


@app.command("new-key", context_settings=PASSED_ON)
def new_key(context: typer.Context) -> None:
    """Write a new Ed25519 key to a FILE that only its owner can read, and print the public key."""
    _run("new-key", context)


def _run(command: str, context: typer.Context) -> None:
    raise SystemExit(follow([*PYTHON, "spark.jobs.certificate", command, *context.args], os.environ))
