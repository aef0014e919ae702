"""`GET /subscriptions/{name}/recent`: times of answers, and the errors that stand."""

from datetime import timedelta

import httpx
import pytest

from app.database.connection import Connection
from app.runtime.state import Runtime
from app.store.subscriptions.recent import ERRORS, FAILED_MOST, RECEIPTS, TOOK
from tests.routers.test_dead_letter_plans import AT, EACH, dead
from tests.support.dead_letters import bury, committed, mailer, subscription
from tests.support.explain import scans

__all__ = ["dead", "mailer"]


@pytest.fixture
async def failing(client: httpx.AsyncClient, db: Connection, group: str, mailer: str) -> list[str]:
    """The ids of eight messages that `mailer` takes."""
    return [await committed(client, {"topic": "order", "body": number}) for number in range(8)]


async def received(db: Connection, message_id: str, duration_ms: int, **columns: object) -> None:
    row = {"outcome": "delivered", "replay": 0, **columns}
    await db.execute(
        'insert into receipt (transaction_id, "position", subscription_id, "offset", attempts, first_at, settled_at, '
        'duration_ms, outcome, replay) select o.transaction_id, 0, s.subscription_id, o."offset", 1, now(), now(), '
        "$2, $3, $4 from outbox o, subscription s where o.transaction_id = $1::uuid and s.name = 'mailer'",
        message_id[:36],
        duration_ms,
        *row.values(),
    )


async def test_nothing_was_delivered_yet(client: httpx.AsyncClient, group: str, mailer: str) -> None:
    found = (await client.get("/subscriptions/mailer/recent")).json()
    assert found == {"took": {"count": 0, "p50_ms": None, "p99_ms": None, "since": None}, "errors": []}
    missing = await client.get("/subscriptions/nobody/recent")
    assert (missing.status_code, missing.json()["type"]) == (404, "/problems/subscription-unknown")


async def test_the_median_is_of_deliveries_alone(client: httpx.AsyncClient, db: Connection, failing: list[str]) -> None:
    for message_id, duration_ms in zip(failing, (10, 20, 30, 40, 900), strict=False):
        await received(db, message_id, duration_ms)
    await received(db, failing[5], 0, outcome="dropped")
    await received(db, failing[0], 7000, replay=3)
    took = (await client.get("/subscriptions/mailer/recent")).json()["took"]
    assert (took["count"], took["p50_ms"], took["p99_ms"]) == (5, 30, 900)


async def test_errors_are_of_what_is_in_retry_or_died_lately(
    client: httpx.AsyncClient, db: Connection, runtime: Runtime, failing: list[str]
) -> None:
    now = runtime.clock.now()
    for message_id, error in zip(failing, ("no route to 10.0.0.1", "no route to 10.0.0.2", None), strict=False):
        await db.execute(
            'insert into delivery_retry (subscription_id, transaction_id, "position", "offset", topic, attempts, '
            "first_at, due_at, last_error) "
            'select s.subscription_id, o.transaction_id, 0, o."offset", o.topic, 1, now(), now(), $2 '
            "from outbox o, subscription s where o.transaction_id = $1::uuid and s.name = 'mailer'",
            message_id[:36],
            error,
        )
    await bury(db, failing[3], "mailer", died_at=now - timedelta(minutes=59), error="no route to 10.0.0.9")
    await bury(db, failing[4], "mailer", died_at=now - timedelta(minutes=59), error="answered 503")
    await bury(db, failing[5], "mailer", died_at=now - timedelta(minutes=61), error="answered 503")
    await subscription(client, "crm")
    await bury(db, failing[6], "crm", died_at=now, error="answered 500")
    errors = (await client.get("/subscriptions/mailer/recent")).json()["errors"]
    assert errors == [
        {"error": "no route to #", "retrying": 2, "dead": 1},
        {"error": "answered 503", "retrying": 0, "dead": 1},
    ]


async def test_both_read_short_ranges_of_indexes(dead: Connection) -> None:
    await dead.execute("reset all")
    found = await scans(dead, ERRORS, ["int", "timestamptz"], (1, AT), generic=True)
    assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows]
    assert sum(scan.rows for scan in found if scan.table == "dead_letter") <= EACH < FAILED_MOST
    await dead.execute(
        'insert into receipt (transaction_id, "position", subscription_id, "offset", outcome, attempts, first_at, '
        "duration_ms, settled_at) "
        "select o.transaction_id, o.position, s, o.\"offset\", 'delivered', 1, now(), 1, now() "
        "from outbox o, generate_series(1, 3) s"
    )
    await dead.execute("analyze receipt")
    found = await scans(dead, TOOK, ["int"], (2,), generic=True)
    assert not [scan for scan in found if scan.node == "Seq Scan" and scan.rows]
    assert sum(scan.rows for scan in found) <= RECEIPTS + len(found)
