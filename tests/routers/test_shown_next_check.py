"""The time of the next check that is shown: not before the pause ends that the producer group asked for."""

from datetime import timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.ids import lowest_id
from app.runtime.state import Runtime
from app.store.coordinator.transactions import HIGHEST, LOWEST, PAGES
from tests.coordinator.test_statement_plans import full
from tests.routers.test_transaction_lists import TYPES
from tests.routers.test_transactions import half_of
from tests.support.check_stepping import in_doubt, row
from tests.support.explain import scans

__all__ = ["full"]

HOLD = "update producer_group set held_until = $1 where name = 'shop'"


async def shown_times(client: httpx.AsyncClient, transaction_id: object) -> set[str | None]:
    """Return the time of the next check in each answer that has it."""
    shown: list[dict[str, Any]] = [(await client.get(f"/transactions/{transaction_id}")).json()]
    for query in ("", "key=order-1030", f"state={shown[0]['state']}", "producer_group=shop&sort=oldest"):
        page = (await client.get(f"/transactions?{query}")).json()
        shown += [one for one in page["items"] if one["transaction_id"] == str(transaction_id)]
    assert len(shown) == 5
    return {one["next_check_at"] for one in shown}


@pytest.mark.parametrize("swept", [False, True])
async def test_the_next_check_is_shown_with_the_pause_that_its_group_asked_for(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str, swept: bool
) -> None:
    transaction_id = await in_doubt(client, runtime) if swept else await half_of(client)
    stored = await db.fetchval("select first_check_at from half")
    if swept:
        stored = (await row(db, transaction_id))["next_check_at"]
    held = runtime.clock.now() + timedelta(seconds=900)
    for until, shown in ((None, stored), (held, held), ("infinity", stored), (stored - timedelta(seconds=1), stored)):
        await db.execute(HOLD.replace("$1", "'infinity'") if until == "infinity" else HOLD, *_given(until))
        assert await shown_times(client, transaction_id) == {f"{shown:%Y-%m-%dT%H:%M:%S.%fZ}"}
    # Producers that claim checks are not held.
    await db.execute(HOLD, held)
    await db.execute("update producer_group set checks = 'claim'")
    assert await shown_times(client, transaction_id) == {f"{stored:%Y-%m-%dT%H:%M:%S.%fZ}"}


def _given(until: object) -> list[object]:
    return [] if until == "infinity" else [until]


async def test_why_a_message_was_not_sent_tells_the_time_with_the_pause(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, group: str
) -> None:
    young, doubted = await half_of(client), await in_doubt(client, runtime)
    held = runtime.clock.now() + timedelta(seconds=900)
    await db.execute(HOLD, held)
    for one in (young, doubted):
        answer = await client.get(f"/transactions/{one}/delivery")
        assert f"{held:%H:%M:%S}" in answer.text


@pytest.mark.parametrize("generic", [True, False])
@pytest.mark.parametrize("group", [None, "shop"])
async def test_a_list_reads_the_group_of_each_row_that_it_shows_and_no_other(
    full: Connection, runtime: Runtime, group: str | None, generic: bool
) -> None:
    low = lowest_id(runtime.clock.now() - timedelta(days=30), 0)
    values = (max(low, LOWEST), HIGHEST, group, None, None, None, None, 101, None, None, None)
    found = await scans(full, PAGES["id"], TYPES[:-1], values, generic=generic)
    assert sum(scan.rows for scan in found if scan.table == "producer_group") <= 101
