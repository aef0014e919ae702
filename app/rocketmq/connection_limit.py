"""How many gRPC connections have calls, and the refusal of calls of further connections."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from app.rocketmq.protocol.definition_pb2 import Code
from app.rocketmq.refusals import CallRefused

# Connections above the limit whose calls are refused with a status. Even more end at once, which says nothing.
SPARE = 64


class ConnectionLimit:
    """Counts connections, by the address of the client. One without a call is ended by gRPC, and not counted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._calls)

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Count the connection for the time of a call. Raises CallRefused if there are too many."""
        if peer not in self._calls and len(self._calls) >= self._most:
            raise CallRefused(
                Code.TOO_MANY_REQUESTS,
                f"This gateway serves {self._most:,} connections (--max-connections), and has them. Connect to another "
                "gateway.",
            )
        self._calls[peer] += 1
        try:
            yield
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
