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
        """Give back what was not sent to a client, and after LEAVE_S what it holds, unless it is connected again."""
        for subscription, handles in self._renewals.take_unsent(client_id, keys).items():
            self._claiming.give_back_unsent(subscription, keys, handles, "the consumer left before it got the message")
        task = asyncio.create_task(self._give_back(client_id, keys))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def stop(self) -> None:
        """Wait until all of it is being given back, at most twice LEAVE_S."""
        if self._waiting:
            _, late = await asyncio.wait(self._waiting, timeout=2 * LEAVE_S)
            for task in late:
                task.cancel()

    async def _give_back(self, client_id: str, keys: ApiKeys) -> None:
        while True:
            await asyncio.sleep(LEAVE_S)
            for subscription, handles in self._renewals.take_of(client_id, keys).items():
                self._claiming.give_back(subscription, keys, handles, "the consumer left")
            # The client may read on, and settle what it gets.
            sent = self._renewals.sent_to(client_id, keys)
            if not sent:
                return
            await asyncio.gather(*(one.over() for one in sent))
