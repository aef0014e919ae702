"""Wait while the service does not answer, as when it restarts."""

import sys
import time

from app.cli.errors import Unavailable

# Between two calls of a service that does not answer.
AGAIN_S = 2.0


class AnswerWait:
    """The waits of a command that calls again. Each reason is printed on stderr once.

    Before the first answer an address that cannot be reached is an error.
    """

    def __init__(self) -> None:
        self._was_answered = False
        self._said = ""

    def end(self) -> None:
        """Note an answer."""
        self._was_answered, self._said = True, ""

    def wait(self, refused: Unavailable) -> None:
        """Wait for as long as the answer asked, at least AGAIN_S. Raises the error if another call has no use."""
        if refused.is_address and not self._was_answered:
            raise refused
        self.wait_for(str(refused).partition("\n")[0], refused.retry_after_s)

    def wait_for(self, reason: str, seconds: float = 0.0) -> None:
        """Print the reason, unless it was the last one, and wait for this long, at least AGAIN_S."""
        wait_s = max(AGAIN_S, seconds)
        if reason != self._said:
            print(f"{reason} Calling again every {wait_s:g} s.", file=sys.stderr)
            self._said = reason
        time.sleep(wait_s)
