"""The disk space of a delivered transaction: rows and indexes by table, and write-ahead log."""

import asyncio
from functools import partial

from app.database.connection import Connection
from bench.filling import fill_ours
from bench.payload import BODY_BYTES
from bench.report import Report
from bench.services import receiving
from bench.stage import Stage, connected, halfnote, relay_busy
from bench.wrk import load

TABLES = ("half", "op", "outbox", "receipt")
WAITS_S = 300
SIZE = """
select coalesce(sum(pg_total_relation_size(inhrelid)), 0)::bigint from pg_inherits where inhparent = $1::regclass
"""
SETTLED = """
select (select count(*) from outbox) as sent, (select count(*) from receipt) as settled,
  pg_current_wal_lsn()::text as wal
"""


async def bench(stage: Stage) -> Report:
    """Store whole transactions, deliver them to one subscription, and then measure the tables."""
    report = Report("disk", f"disk: a transaction of one message ({BODY_BYTES} bytes of request), one subscription")
    dsn = await stage.database("disk")
    async with receiving() as receiver, halfnote(stage, dsn, receiver) as service, connected(dsn) as connection:
        await relay_busy(service, receiver, busy=True)
        empty = {table: await connection.fetchval(SIZE, table) for table in TABLES}
        begun = await connection.fetchval("select pg_current_wal_lsn()::text")
        await load(stage.place, service, "whole", stage.seconds(20, 1), fill=partial(fill_ours, dsn))
        count, ended = await _settled(connection)
        await connection.execute("vacuum analyze half, op, outbox, receipt")
        total = 0.0
        for table in TABLES:
            # Each table by its own number of rows, because the load leaves some halves without an end.
            rows = await connection.fetchval(f"select count(*) from {table}")
            size = (await connection.fetchval(SIZE, table) - empty[table]) / rows
            total += size
            report.add(table, size, "bytes")
        report.add("together", total, "bytes")
        wal = await connection.fetchval("select pg_wal_lsn_diff($1::text::pg_lsn, $2::text::pg_lsn)", ended, begun)
        report.add("write-ahead log", float(wal) / count, "bytes")
        report.notes.append(f"{count:,} transactions")
    await stage.drop("disk")
    return report


async def _settled(connection: Connection) -> tuple[int, str]:
    """Wait until all messages are delivered. Return their number and the position of the write-ahead log."""
    async with asyncio.timeout(WAITS_S):
        while True:
            row = await connection.fetchrow(SETTLED)
            assert row is not None
            if row["sent"] == row["settled"]:
                return row["sent"], row["wal"]
            await asyncio.sleep(0.5)
