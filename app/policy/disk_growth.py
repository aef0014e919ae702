"""PURE: estimate when the database's disk is full, from the sizes that were measured."""

from collections import deque
from datetime import datetime, timedelta

# The growth is that of this time; with less than the first it is not known.
SHORTEST, LONGEST = timedelta(minutes=10), timedelta(hours=6)


class DiskGrowth:
    """The sizes of the last hours, oldest first."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[datetime, int]] = deque()

    def hours_to_full(self, size: int, free: int, now: datetime) -> float | None:
        """Note the size, and return the hours until `free` bytes are used; None while not known or not growing."""
        sizes = self._sizes
        if sizes and now <= sizes[-1][0]:
            # The clock stepped back, so the times before are not comparable.
            sizes.clear()
        sizes.append((now, size))
        while now - sizes[0][0] > LONGEST:
            sizes.popleft()
        since, first = sizes[0]
        grown, hours = size - first, (now - since) / timedelta(hours=1)
        if now - since < SHORTEST or grown <= 0:
            return None
        return max(0, free) * hours / grown
