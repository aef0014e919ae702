"""The memory of one process after a load, with its relay running."""

from functools import partial

from bench.filling import fill_ours
from bench.report import Report
from bench.services import receiving
from bench.stage import Stage, halfnote, relay_busy
from bench.wrk import load

LIMIT_MB = 200


async def bench(stage: Stage) -> Report:
    """Load one process in role `all` with whole transactions, deliver them, and then measure its memory."""
    report = Report("memory", "memory: one process in role all, relay at work")
    dsn = await stage.database("memory")
    async with receiving() as receiver, halfnote(stage, dsn, receiver) as service:
        report.add("resident at start", service.resident_mb(), "MB")
        await relay_busy(service, receiver, busy=True)
        highest = 0.0
        for _ in range(stage.seconds(4)):
            await load(stage.place, service, "whole", stage.seconds(5), fill=partial(fill_ours, dsn))
            highest = max(highest, service.resident_mb())
        report.add("resident after load", highest, "MB", ratio_to="resident at start")
        report.hold("resident after load, MB", highest, at_most=LIMIT_MB)
    await stage.drop("memory")
    return report
