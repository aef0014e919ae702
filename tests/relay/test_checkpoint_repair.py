"""The statements of docs/findings/checkpoint_differs.md: after them everything is delivered, and nothing twice."""

import re
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.support.check_responder import Responder
from tests.support.processes import ROOT
from tests.support.relay_stepping import offsets, order, publish, subscribe, turn_until

PAGE: Path = ROOT / "docs" / "findings" / "checkpoint_differs.md"
SHARDS = 4
FAULTS = {
    "no row": "delete from checkpoint",
    "a missing row": "delete from checkpoint where shard = 1",
    "a row beyond the log": 'update checkpoint set "offset" = 900000 where shard = 2',
    "a row below 0": 'update checkpoint set "offset" = -9 where shard = 2',
    "another shard": "update checkpoint set shard = 9 where shard = 0",
    "another number of shards": "update checkpoint set shards = 2 where shard = 0",
}
# The shards that a worker can hold are held, so the faulty rows were read.
HELD = f"""
select not exists (
  select from checkpoint c left join lease l on l.name = concat_ws(':', 'relay', c.subscription_id, c.shards, c.shard)
  where c.shards = {SHARDS} and c.shard < {SHARDS} and (l.name is null or l.expires_at <= now())
)
"""


def statements(subscription_id: int, lowest: int) -> list[str]:
    """Return what the page says, in order: what shows the rows, and what repairs them."""
    shown = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(shown) == 2
    return [sql.replace(":subscription_id", str(subscription_id)).replace(":lowest", str(lowest)) for sql in shown]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_what_a_repaired_subscription_receives(
    client: httpx.AsyncClient, runtime: Runtime, db: Connection, fault: str
) -> None:
    await publish(client, *(order(n) for n in range(3)))
    async with Responder(status=200) as receiver:
        await subscribe(client, receiver, shards=SHARDS, start="latest")
        wanted = await publish(client, *(order(n) for n in range(10, 22)))
        relay = Relay(runtime)
        await turn_until(relay, runtime, lambda: sorted(offsets(receiver)) == wanted)
        # A worker keeps its place in memory. The next one reads the rows.
        await relay.drain(runtime)
        await db.execute(fault)
        relay = Relay(runtime)
        await turn_until(relay, runtime, lambda: db.fetchval(HELD))
        wanted += await publish(client, *(order(n) for n in range(22, 40)))
        subscription_id = await db.fetchval("select subscription_id from subscription")
        for sql in statements(subscription_id, 0):
            await db.execute(sql)
        rows = await db.fetch('select shards, shard, "offset" >= 3 as placed from checkpoint order by shard')
        assert [tuple(row) for row in rows] == [(SHARDS, shard, True) for shard in range(SHARDS)]
        await turn_until(relay, runtime, lambda: set(wanted) <= set(offsets(receiver)))
        await relay.drain(runtime)
    assert sorted(set(offsets(receiver))) == wanted
    # Sent before the faulty rows: each once. A worker that lost its leases may have sent later ones once before.
    assert not [offset for offset in wanted[:12] if offsets(receiver).count(offset) > 1]
