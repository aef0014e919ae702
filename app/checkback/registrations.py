"""What follows when a producer has started: Halfnote asks the checks that none answered."""

import time
from datetime import datetime

from app.database.connection import Connection
from app.store.checkback import requests

# No batch begins after this time, because the answer of a registration waits. What is left keeps its time, 600 s at
# most.
ASKED_WITHIN_S = 2.0


async def ask_unanswered(connection: Connection, group: str, now: datetime) -> None:
    """Make all checks of a group due at once that were not answered and wait for their next try, or are in flight.

    Each batch is a database transaction of its own, so `connection` must be in none. Raises the database's errors.
    """
    until = time.monotonic() + ASKED_WITHIN_S
    # Those in flight first: what this makes due may be in flight a moment later, and is not to be asked twice.
    for ask in (requests.ask_in_flight, requests.ask_waiting):
        while await ask(connection, group, now) >= requests.AT_ONCE and time.monotonic() < until:
            pass
