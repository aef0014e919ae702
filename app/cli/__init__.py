"""The command line `halfnote`: serve, migrate, reconcile, and commands that call the API."""

import os
import signal
from types import FrameType
from typing import NoReturn

# The exit status of a command that Ctrl-C ended.
INTERRUPTED = 130


def main() -> None:
    """Run the command line. A refusal is printed on stderr and ends with exit code 1, wrong usage with 2."""
    before = signal.getsignal(signal.SIGINT)
    # A shell starts some commands with Ctrl-C ignored.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_at_once)
    # Imported here: the imports take most of a short command's time, and Ctrl-C would end them with a traceback.
    from app.cli.commands import run

    signal.signal(signal.SIGINT, before)
    run()


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the process. Nothing has begun that would have to be ended."""
    os._exit(INTERRUPTED)
