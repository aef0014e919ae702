"""Standard output that is closed, takes no more, or has an encoding without some characters."""

import codecs
import io
import json
import os
import sys
from contextlib import suppress

# An error handler of codecs.
ESCAPES = "halfnote.escapes"


def prepare_streams() -> None:
    """Let stdout and stderr print every text, and put other files in the place of streams that are closed.

    A character that the encoding lacks becomes `\\u…` as in JSON, so that JSON stays JSON. Each write to a stdout that
    was closed fails with OSError.
    """
    closed = [number for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)) if stream is None]
    # In this order each gets the file descriptor of the one that is closed.
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (until the process ends)
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    # Otherwise child processes would start without them, and another file could get such a descriptor there.
    for number in closed:
        with suppress(OSError):
            os.set_inheritable(number, True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ESCAPES)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


codecs.register_error(ESCAPES, _escaped)


def printable(text: str, otherwise: str) -> str:
    """Return a text of the command's own, or the other one if the encoding of stdout lacks its characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return otherwise
    return text


def output_error(after: str = "") -> OSError | None:
    """Print a text; return why stdout does not take it and what was printed before, or None if it takes all."""
    try:
        # A closed terminal refuses even a text without characters, after all else was printed.
        if after:
            sys.stdout.write(after)
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def discard_output() -> None:
    """Discard what could not be printed: the interpreter's end would write it again, fail, and change the status."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
