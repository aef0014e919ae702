"""The relay with a destination whose client library cancels its own callers."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from app.database.connection import Connection
from app.delivery import Delivered, Delivery, Outcome
from app.destinations.base import Destination
from app.relay import assignments
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Responder
from tests.support.relay_stepping import order, publish, subscribe, turn_until


class _Cancelling:
    """A destination whose first call raises CancelledError although nothing cancelled the caller."""

    address, batch_max = "cancelling", 1

    def __init__(self) -> None:
        self.calls = 0

    async def deliver(self, deliveries: Sequence[Delivery], now: datetime) -> Sequence[Outcome]:
        self.calls += 1
        if self.calls == 1:
            raise asyncio.CancelledError
        return [Delivered(None, 0)] * len(deliveries)

    async def close(self) -> None:
        pass


async def test_a_cancelled_error_of_a_client_loses_no_message(
    client: httpx.AsyncClient, runtime: Runtime, group: str, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelling = _Cancelling()

    def opened(*_: Any) -> Destination:
        return cancelling

    monkeypatch.setattr(assignments, "destination_of", opened)
    relay = Relay(runtime)
    async with Responder() as receiver:
        await subscribe(client, receiver, max_in_flight=1, retry=[10])
        await publish(client, order(1))
        with capture_logs() as logs:
            await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from delivery_retry"))
        runtime.clock.offset_s += 12
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 1 from receipt"))
        await relay.drain(runtime)
    assert [one["event"] for one in logs if one["log_level"] == "error"] == ["defect"]
    errors = [row[0] for row in await db.fetch("select error from attempt where error is not null")]
    assert errors == ["Halfnote failed with CancelledError; its log has the details"]
