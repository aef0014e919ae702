"""What the relay sent is what the producer posted, or the proof tells: over a day of the real service."""

from datetime import UTC, datetime

import httpx
import pytest

from app.database import Connection
from app.ids import message_id
from app.loops.relay import Relay
from app.runtime import Runtime
from tests.relays import order, publish, subscribe, turn_until
from tests.responders import Responder
from tests.spark.days import prove, rows

pytestmark = pytest.mark.usefixtures("group", "spark")


async def test_a_body_that_was_spoilt_before_it_was_sent_is_a_finding(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str
) -> None:
    """By hand or by a disk, between its commit and its delivery; nothing in the half's other columns tells."""
    day = datetime.now(UTC).date()
    relay = Relay(runtime)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1), order(2))
        spoilt = await db.fetchval(
            "update half set body = 'spoilt' where transaction_id = (select max(transaction_id::text)::uuid from half) "
            "returning transaction_id"
        )
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from receipt"))
        await relay.drain(runtime)
    assert b"spoilt" in [call.body for call in receiver.calls]
    assert prove(dsn, "--day", day) == 3
    [found] = rows(dsn, "select * from finding")
    assert (found["kind"], found["subject"]) == ("content_differs", message_id(spoilt, 0))
    assert {digest["source"].partition(":")[0] for digest in found["detail"]["digests"]} == {"half", "receipt"}
