"""What RocketMQ 5 clients hold that say that they end: other consumers get it soon, as from RocketMQ's proxy."""

import asyncio

from app.rocketmq.claiming import Claiming
from app.rocketmq.credentials import ApiKeys
from app.rocketmq.renewals import Renewals

# A client may still settle messages after it has said that it ends, or has left a group or a topic.
LEAVE_S = 1.0


class Leaving:
    """Gives back the messages of clients that end."""

    def __init__(self, claiming: Claiming, renewals: Renewals) -> None:
        self._claiming, self._renewals = claiming, renewals
        self._waiting: set[asyncio.Task[None]] = set()

    def left(self, client_id: str, keys: ApiKeys) -> None:
        """Give back what a client holds after LEAVE_S, unless it is connected again by then."""
        task = asyncio.create_task(self._give_back(client_id, keys))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def stop(self) -> None:
        """Wait until all of it is being given back, at most LEAVE_S."""
        if self._waiting:
            await asyncio.wait(self._waiting)

    async def _give_back(self, client_id: str, keys: ApiKeys) -> None:
        await asyncio.sleep(LEAVE_S)
        for subscription, handles in self._renewals.take_of(client_id, keys).items():
            self._claiming.give_back(subscription, keys, handles, "the consumer left")
