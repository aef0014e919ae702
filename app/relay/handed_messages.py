"""PURE: messages that were handed over after their commit and that a stream of this process has not taken yet."""

from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta

from app.store.relay.log import Outgoing

# Messages are kept so long for streams that must first read what is before them. Those that were committed longer ago
# are not taken at all: only the log shows whether their day is still open.
KEPT_FOR = timedelta(seconds=1)
# The most messages that are kept. The log has all of them.
KEPT_MOST = 4000


class HandedMessages:
    """Runs of messages in the order of their arrival; the offsets of a run follow each other without a gap."""

    def __init__(self) -> None:
        self._runs: deque[Sequence[Outgoing]] = deque()
        self._kept = 0

    def __len__(self) -> int:
        return self._kept

    def add(self, messages: Sequence[Outgoing], now: datetime) -> None:
        """Add messages in the order of their offsets; a gap between two of them begins a new run."""
        first = 0
        for index in range(1, len(messages) + 1):
            if index == len(messages) or messages[index].offset != messages[index - 1].offset + 1:
                self._add(messages[first:index])
                first = index
        self._forget(now)

    def runs(self, now: datetime) -> Sequence[Sequence[Outgoing]]:
        """Return the runs that no stream of this process waits for too long."""
        self._forget(now)
        return tuple(self._runs)

    def taken(self, run: Sequence[Outgoing]) -> None:
        """Forget a run that all streams have taken."""
        self._runs.remove(run)
        self._kept -= len(run)

    def _add(self, run: Sequence[Outgoing]) -> None:
        if run:
            self._runs.append(run)
            self._kept += len(run)

    def _forget(self, now: datetime) -> None:
        runs = self._runs
        while runs and (self._kept > KEPT_MOST or now - runs[0][0].committed_at > KEPT_FOR):
            self._kept -= len(runs.popleft())
