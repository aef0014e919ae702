"""`halfnote watch`: the status screen, again and again."""

import sys
import time
from typing import Annotated

import typer

from app.cli.api_client import DEFAULT_URL, Url, call
from app.cli.errors import Refusal
from app.cli.status import print_status

# Moves to the first line and clears the rest (ECMA-48: CUP, ED).
_CLEAR = "\x1b[H\x1b[J"


def watch(
    every_s: Annotated[float, typer.Option(min=1, help="seconds between two looks")] = 5.0,
    times: Annotated[int | None, typer.Option(min=1, help="end after so many looks; without it, with Ctrl-C")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the screen of `halfnote status` every few seconds, until Ctrl-C."""
    looks = 0
    try:
        while True:
            _look(url)
            looks += 1
            if looks == times:
                return
            time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _look(url: str) -> None:
    """Print the screen, or why there is none: a service that restarts is back in a moment."""
    try:
        found = call(url, "GET", "/stats")
    except Refusal as refusal:
        if refusal.problem:
            raise
        print(refusal, file=sys.stderr)
        return
    print(_CLEAR if sys.stdout.isatty() else "", end="")
    print(f"{url} at {found['at']}\n")
    print_status(found)
