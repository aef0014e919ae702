"""The relay's turn over streams whose messages can expire."""

from collections.abc import Iterable
from datetime import datetime

from app.relay.lost_claims import closing_if_lost
from app.relay.stream import Stream
from app.runtime.state import Runtime
from app.store.relay.announcements import announce


async def expire(runtime: Runtime, streams: Iterable[Stream], now: datetime) -> None:
    """Queue dead letters for the messages that must not wait any longer; announce that others approach a limit."""
    for stream in streams:
        expiry = stream.expiry
        if expiry is None or stream.closing or stream.lost or not expiry.due(now):
            continue
        async with runtime.database.connection() as connection:
            with closing_if_lost(connection, [stream]):
                claimed = await expiry.claim(connection, now)
            stream.expire(claimed, now)
        approaching = expiry.approaching(now)
        if approaching is not None:
            async with runtime.database.transaction() as connection:
                written = await announce(connection, [approaching], now)
            expiry.announced()
            if written:
                runtime.wake_ups.published()
