"""Feed the replays of subscriptions whose consumers claim, and end those that are over."""

from collections.abc import Sequence
from datetime import datetime

from app.database.connection import Connection
from app.store.pull.replay_feed import feed
from app.store.relay.checkpoints import end_replays
from app.store.subscriptions.replays import running
from app.store.subscriptions.subscriptions import active


async def feed_replays(connection: Connection, pulled: Sequence[int], now: datetime) -> bool:
    """Store the next messages of each running replay of these subscriptions; return whether more follow now."""
    replays = [one for one in await running(connection) if one.subscription_id in pulled]
    if not replays:
        return False
    subscriptions = await active(connection, [one.subscription_id for one in replays])
    more = False
    for replay in replays:
        subscription = subscriptions.get(replay.subscription_id)
        if subscription is not None:
            more = await feed(connection, replay, subscription, now) or more
    await end_replays(connection, now)
    return more
