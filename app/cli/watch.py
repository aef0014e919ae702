"""`halfnote watch`: the status screen, whenever the state of the service changes."""

import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Annotated, Any

import httpx
import typer

from app.cli.api_client import DEFAULT_URL, Url, stream_lines
from app.cli.errors import Unavailable
from app.cli.status import print_status
from app.cli.waiting import AGAIN_S, AnswerWait

# Moves to the first line and clears the rest (ECMA-48: CUP, ED).
_CLEAR = "\x1b[H\x1b[J"


def watch(
    times: Annotated[int | None, typer.Option(min=1, help="end after so many screens; without it, with Ctrl-C")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Show the screen of `halfnote status` now and whenever it changes, until Ctrl-C (`GET /events`).

    While the service does not answer, this waits and says so on stderr.
    """
    shown = 0
    try:
        for found in _screens(url, is_live=sys.stdout.isatty()):
            print(_CLEAR if sys.stdout.isatty() else "", end="")
            print(f"{url} at {found['at']}\n")
            print_status(found)
            shown += 1
            if shown == times:
                return
    except KeyboardInterrupt:
        return


def _screens(url: str, *, is_live: bool) -> Iterator[dict[str, Any]]:
    """Yield the state whenever it changes; on a terminal also at each sign of life, so that ages go on.

    A service that restarts is back in a moment: the stream is opened again from the last state seen.
    """
    seen, state, at = None, None, 0.0
    waiting = AnswerWait()
    while True:
        try:
            for event in _events(stream_lines(url, "/events", {} if seen is None else {"last-event-id": seen})):
                waiting.end()
                if event.get("event") == "stats":
                    seen, state, at = event["id"], json.loads(event["data"]), time.monotonic()
                    yield state
                elif event.get("event") == "unavailable":
                    print(json.loads(event["data"])["detail"], file=sys.stderr)
                elif state is not None and is_live:
                    yield {**state, "at": _later(state["at"], time.monotonic() - at)}
        except Unavailable as refused:
            waiting.wait(refused)
        except httpx.HTTPError as error:
            waiting.wait_for(f"{url} ended the stream: {error or type(error).__name__}.")
        else:
            time.sleep(AGAIN_S)


def _events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Yield server-sent events by their fields; a comment is one without fields."""
    event: dict[str, str] = {}
    for line in lines:
        if line == "":
            yield event
            event = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            event[name] = value.removeprefix(" ")


def _later(at: str, seconds: float) -> str:
    return (datetime.fromisoformat(at) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
