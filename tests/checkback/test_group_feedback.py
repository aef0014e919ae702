"""What the checks of one batch change about their group."""

from dataclasses import replace
from datetime import timedelta

import httpx
import pytest

from app.checkback.check import Check, FinishedCheck
from app.checkback.group_feedback import GroupFeedback
from app.database.connection import Connection
from app.ids import uuid7
from app.policy.check_schedule import Answered, CheckAgain, CheckResult, Unanswered
from app.runtime.state import Runtime
from app.store.checkback.claims import AskedGroup, Claim, asked_groups
from app.store.checkback.results import Adjustment, adjust
from app.verdicts import CheckBackState

SHOP = "/producer-groups/shop"
BUSY = Unanswered("503", congested=True, hold_s=600)


def finished(runtime: Runtime, group: AskedGroup, result: CheckResult) -> FinishedCheck:
    now = runtime.clock.now()
    claim = Claim(uuid7(now), group.name, CheckBackState.IN_DOUBT, 1, 0, 0, None, 1)
    return FinishedCheck(Check(claim, group, (), ()), now, CheckAgain(now), result)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("first_registration", [False, True])
async def test_a_batch_that_spans_a_registration_adjusts_its_group_once(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, newest_first: bool, first_registration: bool
) -> None:
    """The check that was sent after it holds the group; both count for the window."""
    assert (await client.put(SHOP, json={"check_urls": ["http://127.0.0.1:9/"]})).status_code == 201
    now = runtime.clock.now()
    await db.execute("update producer_group set registered_at = $1", now)
    group = (await asked_groups(db, ["shop"]))["shop"]
    before = replace(group, registered_at=None if first_registration else now - timedelta(seconds=9))
    for earlier, later, held in ((Answered(None), BUSY, True), (BUSY, Answered(None), False)):
        batch = [finished(runtime, before, earlier), finished(runtime, group, later)]
        if newest_first:
            batch.reverse()
        await db.execute("update producer_group set check_window = 20, held_until = null")
        until = now + timedelta(seconds=600) if held else None
        adjustments = GroupFeedback().adjustments(batch, now)
        assert adjustments == [Adjustment("shop", group.updated_at, now, True, 0, until)]
        await adjust(db, adjustments)
        assert tuple(await db.fetchrow("select check_window, held_until from producer_group")) == (10, until)
