"""The proof compares what the relay sent with what the producer posted, over a day of the real service."""

import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pyarrow.dataset
import pytest

from app.database.connection import Connection
from app.ids import message_id
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.spark.days import prove, rows
from tests.support.check_responder import Responder
from tests.support.relay_stepping import order, publish, subscribe, turn_until

pytestmark = pytest.mark.usefixtures("group", "spark")


async def test_a_body_that_was_damaged_before_it_was_sent_is_a_finding(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, dsn: str, tmp_path: Path
) -> None:
    """A body changes between commit and delivery, and the half's other columns do not show it."""
    day = datetime.now(UTC).date()
    relay = Relay(runtime)
    async with Responder() as receiver:
        await subscribe(client, receiver)
        await publish(client, order(1), order(2))
        damaged = await db.fetchval(
            "update half set body = 'damaged' "
            "where transaction_id = (select max(transaction_id::text)::uuid from half) "
            "returning transaction_id"
        )
        await turn_until(relay, runtime, lambda: db.fetchval("select count(*) = 2 from receipt"))
        await relay.drain(runtime)
    assert b"damaged" in [call.body for call in receiver.calls]
    assert prove(dsn, "--day", day, "--out", tmp_path) == 3
    # The half's digest of its body shows the damage, too.
    found, altered = rows(dsn, "select * from finding order by kind")
    assert (found["kind"], found["subject"]) == ("content_differs", message_id(damaged, 0))
    assert (altered["kind"], altered["transaction_id"]) == ("half_altered", damaged)
    assert {digest["source"].partition(":")[0] for digest in found["detail"]["digests"]} == {"half", "receipt"}
    # The run and its files say the same.
    [run] = rows(dsn, "select * from reconciliation_run")
    assert (run["state"], run["days"], run["open"], run["new"], run["resolved"]) == ("findings", [day], 2, 2, 0)
    files = pyarrow.dataset.dataset(tmp_path / "findings", partitioning="hive").to_table().to_pylist()
    [written] = [one for one in files if one["kind"] == found["kind"]]
    assert len(files) == 2
    assert json.loads(written["detail"]) == found["detail"]
    assert (written["kind"], written["subject"]) == (found["kind"], found["subject"])
    assert str(damaged) in (tmp_path / "report.html").read_text()
