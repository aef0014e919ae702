"""The relay's turn over streams whose messages can expire."""

from datetime import datetime

from app.relay.assignments import Assignments
from app.relay.expiry import CLAIM_FOR
from app.relay.lost_claims import closing_if_lost
from app.runtime.state import Runtime
from app.store.relay.announcements import announce


async def expire(runtime: Runtime, assignments: Assignments, now: datetime) -> None:
    """Queue dead letters for the messages that must not wait any longer; announce that others approach a limit."""
    for stream in assignments.streams.values():
        expiry = stream.expiry
        if expiry is None or stream.closing or stream.lost or not expiry.due(now):
            continue
        async with runtime.database.connection() as connection:
            await expiry.count(connection, now)
            for claim in (expiry.claim_old, expiry.claim_surplus):
                # Each is committed by itself, so the stream knows of the first before the second.
                with closing_if_lost(connection, [stream], assignments.close):
                    claimed = await claim(connection, now)
                stream.expire(claimed, now + CLAIM_FOR, now)
            stream.expire_unsent(now)
        approaching = expiry.approaching(now)
        if approaching is not None:
            async with runtime.database.transaction() as connection:
                written = await announce(connection, [approaching], now)
            expiry.announced()
            if written:
                runtime.wake_ups.published()
