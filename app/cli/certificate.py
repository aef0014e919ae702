"""`halfnote certificate`: certificates of days: list, show one, verify one without a database, make a key."""

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, path_of, print_json
from app.cli.errors import Refusal
from app.cli.reconcile import PASSED_ON, PYTHON
from app.cli.spark_program import follow
from app.cli.tables import print_table

app = typer.Typer(help="Certificates of final days: list, show, verify, and make a signing key.", no_args_is_help=True)

Day = Annotated[str, typer.Argument(help="the day, YYYY-MM-DD")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="the most days to list")]
BROKEN = 3
NOT_CERTIFIED = "day-not-certified"
KEY_SHOWN = 16
Out = Annotated[Path | None, typer.Option(help="write the certificate to this file instead")]


@app.command("list")
def list_certificates(limit: Limit = 30, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """List the newest days with state, certificate number, signing key, and whether the chain is intact.

    Only `verify` verifies signatures. Exit codes: 0 intact, 1 it failed, 2 wrong usage, 3 a chain is broken.
    """
    days = call(url, "GET", "/reconciliation", query={"limit": limit}, as_json=as_json)["days"]["items"]
    certificates: dict[str, Any] = {}
    listed = [_listed(url, one, certificates) for one in days]
    if as_json:
        print_json({"items": listed})
    else:
        columns = ("day", "state", "certificate", "key", "chain")
        print_table(columns, [_row(one) for one in listed], whole=columns)
    if any(one["chain"] == "broken" for one in listed):
        raise SystemExit(BROKEN)


def _listed(url: str, day: dict[str, Any], certificates: dict[str, Any]) -> dict[str, Any]:
    """Return a day of the list; `certificates` are the fetched ones by day."""
    # Every day is asked for: a run after the certificate may have stored another state.
    found = _cached(url, day["day"], certificates)
    shown = {"day": day["day"], "state": day["state"], "sequence": None, "public_key": None, "chain": None}
    if found is None:
        return shown
    key = found["signature"] and found["signature"]["public_key"]
    chain = _chain(url, found["certificate"], certificates)
    return shown | {"sequence": found["certificate"]["sequence"], "public_key": key, "chain": chain}


def _chain(url: str, certificate: dict[str, Any], certificates: dict[str, Any]) -> str:
    """Return `first`, `ok` or `broken`: whether a certificate names the one before it, by number and digest."""
    previous, sequence = certificate["previous"], certificate["sequence"]
    if previous is None:
        return "first" if sequence == 1 else "broken"
    before = _cached(url, previous["day"], certificates)
    if before is None or before["certificate"]["sequence"] != sequence - 1:
        return "broken"
    return "ok" if sha256(_text_of(before).encode()).hexdigest() == previous["digest"] else "broken"


def _cached(url: str, day: str, certificates: dict[str, Any]) -> Any:
    """Return a day's certificate, or None if the day has none."""
    if day not in certificates:
        try:
            certificates[day] = _fetched(url, day)
        except Refusal as refused:
            if not str(refused.problem.get("type", "")).endswith(NOT_CERTIFIED):
                raise
            certificates[day] = None
    return certificates[day]


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
