"""Standard output that is closed, takes no more, or has an encoding without some characters."""

import codecs
import errno
import io
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# An error handler of codecs.
ESCAPES = "halfnote.escapes"
# The file name in errors of stdout.
STDOUT = "<stdout>"


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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _named(sys.stdout)
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


class _Output(io.FileIO):
    """The file of stdout. It names itself in its errors, so that they are told from errors of another cause."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        # The garbage collection of the stream would close the descriptor.
        self.stream = stream

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, as FileIO does. Raises OSError with the file name STDOUT."""
        try:
            written: int | None = super().write(data)
        except OSError as error:
            error.filename = STDOUT
            raise
        if written is None:
            # A pipe that its reader made non-blocking is full.
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), STDOUT)
        return written


def _named(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """Return stdout on a file that names itself in its errors, or the same if it is no plain file."""
    layer = stream.buffer
    plain = layer.raw if isinstance(layer, io.BufferedWriter) else layer
    if type(plain) is not io.FileIO:
        return stream
    output = _Output(stream)
    return io.TextIOWrapper(
        # Python's -u leaves out the buffer.
        io.BufferedWriter(output) if isinstance(layer, io.BufferedWriter) else output,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def is_of_output(error: BaseException | None) -> bool:
    """Return whether stdout refused a text by this error."""
    return isinstance(error, OSError) and error.filename == STDOUT


def output_error() -> OSError | None:
    """Print what is left; return why stdout does not take it, or None."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def discard_output() -> None:
    """Discard what could not be printed: the interpreter's end would write it again, fail, and change the status."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
