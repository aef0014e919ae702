"""`halfnote certificate`: certificates of days: show one, verify one without a database, make a key."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from app.cli.api_client import DEFAULT_URL, Url, call, path_of
from app.cli.errors import Refusal
from app.cli.reconcile import PASSED_ON, PYTHON
from app.cli.spark_program import follow

app = typer.Typer(help="Certificates of final days: show, verify, and make a signing key.", no_args_is_help=True)

Day = Annotated[str, typer.Argument(help="the day, YYYY-MM-DD")]
Out = Annotated[Path | None, typer.Option(help="write the certificate to this file instead")]


@app.command("show")
def show(day: Day, out: Out = None, url: Url = DEFAULT_URL) -> None:
    """Print the certificate of a day, byte for byte, for `halfnote certificate verify`."""
    answer = call(url, "GET", path_of("reconciliation", day, "certificate"))
    # The canonical form, which the answer has and the signature covers.
    document = json.dumps(answer, sort_keys=True, separators=(",", ":")) + "\n"
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
