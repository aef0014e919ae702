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
    """The service does not answer now, or answered that it cannot: the same call may succeed later.

    `retry_after_s`: when, if the answer said so. `is_address`: the host has no address, or does not speak TLS as asked,
    so a setting may be wrong.
    """

    def __init__(
        self,
        text: str,
        *,
        problem: dict[str, Any] | None = None,
        retry_after_s: float = 0.0,
        is_address: bool = False,
    ) -> None:
        super().__init__(text, problem=problem)
        self.retry_after_s, self.is_address = retry_after_s, is_address


WRONG_USAGE = 2
