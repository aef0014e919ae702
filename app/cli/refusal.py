"""What ends a command without a traceback."""


class Refusal(Exception):
    """The command could not do what it was asked; the text says why and what to do. `code` is the exit code."""

    def __init__(self, text: str, *, code: int = 1) -> None:
        super().__init__(text)
        self.code = code
