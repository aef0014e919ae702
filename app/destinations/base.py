"""The interface of every destination: it takes deliveries and returns outcomes, and neither retries nor records."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from app.delivery import Delivery, Outcome


class Destination(Protocol):
    """Sends a subscription's messages. Each stream has its own destination and closes it."""

    @property
    def address(self) -> str:
        """The address for people, without credentials."""

    @property
    def batch_max(self) -> int:
        """The most messages that one call of `deliver` takes."""

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        """Send 1 to `batch_max` messages in this order and return their outcomes in the same order.

        Returns within the subscription's timeout. Called concurrently. Connects on the first call, and again after a
        connection broke. Expected failures are outcomes, not exceptions.
        """

    async def close(self) -> None:
        """Close the connections. No call of `deliver` is in progress."""


def current_task_cancelled() -> bool:
    """Whether a CancelledError is the current task's own. Client libraries raise it too when a connection breaks."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
