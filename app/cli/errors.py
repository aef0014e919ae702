"""The error that ends a command without a traceback."""


class Refusal(Exception):
    """The command failed; the text says why and what to do. `code` is the exit code."""

    def __init__(self, text: str, *, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


WRONG_USAGE = 2
