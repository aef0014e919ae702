"""What a removed day leaves in the small tables is deleted in steps, and each continues where the last one ended."""

from datetime import UTC, datetime

import pytest

from app.database.connection import Connection
from app.retention.loop import clear_leftovers
from app.store.retention.days import days
from tests.retention.test_loop import open_snapshot

ROWS = 100_000
REPLAY = 7
# Ids that rise from a time in milliseconds, as those of halves.
IDS = "(lpad(to_hex($1::bigint + n / 10), 12, '0') || '70008000' || lpad(to_hex(n), 12, '0'))::uuid"
WRITE = {
    "check_back": "insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at) "
    f"select {IDS}, 'shop', 1, now(), now() from generate_series(1, {ROWS}) n",
    # Of two subscriptions, in live delivery and in a replay.
    "delivery_retry": 'insert into delivery_retry (subscription_id, replay, transaction_id, position, "offset", topic, '
    f"attempts, due_at) select s, r, {IDS}, 0, n, 'order', 1, now() "
    f"from generate_series(1, {ROWS // 4}) n, (values (1), (2)) x(s), (values (0), ({REPLAY})) y(r)",
}


async def pages_read(db: Connection, table: str) -> int:
    """Return how many pages of a table's indexes sessions have read."""
    await db.fetchval("select pg_stat_force_next_flush()")
    read: int = await db.fetchval(
        "select sum(idx_blks_hit + idx_blks_read)::bigint from pg_statio_user_indexes where relname = $1", table
    )
    return read


@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("table", list(WRITE))
async def test_a_step_does_not_pass_the_rows_of_earlier_ones(
    dsn: str, db: Connection, table: str, analyzed: bool
) -> None:
    """Deleted rows stay in the index until a vacuum, here because a session may see them, as a run of the proof."""
    day = (await days(db))[0]
    await db.execute(f"alter table {table} set (autovacuum_enabled = off)")
    await db.execute(WRITE[table], day.low.int >> 80)
    if analyzed:
        await db.execute(f"analyze {table}")
    await db.execute("update day set state = 'gone', changed_at = now() where day = $1", day.day)
    pages: int = await db.fetchval(f"select pg_relation_size('{table}_pkey') / current_setting('block_size')::int")
    async with open_snapshot(dsn):
        before = await pages_read(db, table)
        await clear_leftovers(db, datetime.now(UTC))
        read = await pages_read(db, table) - before
    assert await db.fetchval(f"select count(*) from {table}") == 0
    assert read < 2 * pages
