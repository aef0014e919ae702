"""The connections that are in use. Those that are for too long are closed, which ends their statements with an error.

The kernel of a frozen server still answers, and so does a pooler or proxy whose server is gone. Their connections stay
open, and a statement has no time limit of its own: a timer for each would cost the statements of the relay.
"""

from typing import TypeAlias

import asyncpg

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# No turn of a loop and no request takes so many looks, 5 minutes. Upkeep and migrations do; they have connections of
# their own. Looks are counted, not seconds: a process that was stopped for an hour keeps its connections.
LENT_FOR_LOOKS = 30


class LentConnections:
    """At how many looks each connection of a Database was lent, since it was lent last."""

    def __init__(self) -> None:
        self._looks: dict[Connection, int] = {}

    def lend(self, connection: Connection) -> None:
        """Note that a connection is in use from now on."""
        self._looks[connection] = 0

    def take_back(self, connection: Connection) -> None:
        """Note that a connection is no longer in use."""
        del self._looks[connection]

    def overdue(self) -> list[Connection]:
        """Look once: return those that were lent at more than LENT_FOR_LOOKS looks."""
        for connection in self._looks:
            self._looks[connection] += 1
        return [one for one in self._looks if self.is_overdue(one)]

    def is_overdue(self, connection: Connection) -> bool:
        """Return whether a connection is lent, and was so at more than LENT_FOR_LOOKS looks."""
        return self._looks.get(connection, 0) > LENT_FOR_LOOKS and not connection.is_closed()

    def lend_longer(self, connection: Connection) -> None:
        """Count the looks of a connection from 0 again, if it is still lent."""
        if connection in self._looks:
            self._looks[connection] = 0
