"""The error that ends a command without a traceback."""

from typing import Any


class Refusal(Exception):
    """The command failed; the text says why and what to do. `code` is the exit code.

    `problem` is the API's answer, if it answered.
    """

    def __init__(self, text: str, *, code: int = 1, problem: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.problem = problem or {}


class Unavailable(Refusal):
    """The service does not answer now, or answered 503: the same call may succeed later."""


WRONG_USAGE = 2
