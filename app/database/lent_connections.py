"""The connections that are in use. One that is for too long is closed, which ends its statement with an error.

The kernel of a frozen server still answers, and so does a pooler or proxy whose server is gone. Their connections stay
open, and a statement has no time limit of its own: a timer for each would cost the statements of the relay.
"""

from typing import TypeAlias

import asyncpg

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# No turn of a loop and no request takes so long. Upkeep and migrations do; they have connections of their own.
LENT_AT_MOST_S = 300.0


class LentConnections:
    """Since when each connection of a Database is lent, by the monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[Connection, float] = {}

    def lend(self, connection: Connection, at: float) -> None:
        """Note that a connection is in use from now on."""
        self._since[connection] = at

    def take_back(self, connection: Connection) -> None:
        """Note that a connection is no longer in use."""
        del self._since[connection]

    def close_overdue(self, at: float) -> int:
        """Close those that have been lent for more than LENT_AT_MOST_S; return how many."""
        overdue = [one for one, since in self._since.items() if at - since > LENT_AT_MOST_S and not one.is_closed()]
        for connection in overdue:
            connection.terminate()
        return len(overdue)
