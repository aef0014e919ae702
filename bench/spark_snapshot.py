"""The cost of the proof's read for a running service: how long the snapshot is held, and the service's throughput."""

import asyncio
from functools import partial
from statistics import median

from bench.filling import fill_ours
from bench.report import Report
from bench.services import receiving
from bench.spark_day import day_before_yesterday, settle
from bench.spark_run import generate, reconcile
from bench.stage import Stage, connected, halfnote
from bench.statistic import median_ratio
from bench.wrk import load

TRANSACTIONS, TRANSACTIONS_QUICK = 3_000_000, 100_000
NAME = "spark_snapshot"
LEAST = 0.7
# Sessions in any state: between two fetches, a reader that waits for the service is idle in its database transaction.
READS = "select count(*) from pg_stat_activity where application_name = 'halfnote proof'"
# The seeded day must stay until the end of the run. Delivered messages are not delivered again.
ENV = {"HALFNOTE_RETENTION_S": str(30 * 86_400)}


async def bench(stage: Stage, report: Report) -> None:
    """Load the service with whole transactions, alone and while a day of its database is read, in turn."""
    count, day = TRANSACTIONS_QUICK if stage.quick else TRANSACTIONS, str(day_before_yesterday())
    dsn = await stage.database(NAME)
    made = await generate("--database-url", dsn, "--day", day, "--transactions", str(count))
    await settle(dsn)
    alone, during, held, outlived = [], [], [], 0
    async with receiving() as receiver, halfnote(stage, dsn, receiver, env=ENV) as service:
        slice_ = partial(load, stage.place, service, "whole", stage.seconds(8), fill=partial(fill_ours, dsn))
        await slice_()
        for _ in range(stage.seconds(3)):
            alone.append((await slice_()).rate / 2)
            run = asyncio.create_task(reconcile("--database-url", dsn, "--day", day))
            await _reading(dsn, run)
            during.append((await slice_()).rate / 2)
            outlived += not await _is_reading(dsn)
            held.append((await run).read_s)
    report.add("rows read", made.rows, "rows")
    report.add("snapshot held, service loaded for a part of it", median(held), "s")
    base, ratio = "whole transactions, alone", median_ratio(during, alone)
    report.add(base, median(alone), "transactions/s")
    report.add("whole transactions, during a read", median(during), "transactions/s", ratio_to=base, ratio=ratio)
    if outlived:
        report.notes.append(f"{outlived} of {len(during)} reads were over before their slice was")
    report.hold("throughput of the API during a read", ratio, at_least=LEAST)
    await stage.drop(NAME)


async def _reading(dsn: str, run: "asyncio.Task[object]") -> None:
    """Wait until rows are being read. Raises the error of the run if it ends first."""
    while not await _is_reading(dsn):
        if run.done():
            await run
            return
        await asyncio.sleep(0.05)


async def _is_reading(dsn: str) -> bool:
    async with connected(dsn) as connection:
        return bool(await connection.fetchval(READS))
