"""Rates with 1, 2 and 4 API processes, with normal commits and with commits that take 3 ms longer."""

from collections import defaultdict
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from bench.filling import fill_ours
from bench.report import Report
from bench.services import receiving
from bench.stage import Stage, connected, halfnote
from bench.wrk import load

WORKERS, WORKERS_QUICK = (1, 2, 4), (1, 2)
DELAY_S = 0.003

# A deferred trigger makes each commit take 3 ms longer. It runs inside COMMIT, so the locks are held as during a wait
# for a disk. Its condition is evaluated for each row and is true once per database transaction, so a flush of 500 rows
# sleeps once. Commits of several connections wait at the same time, as with a synchronous standby 3 ms away, but not as
# with a disk.
SLOW_COMMITS = f"""
create function bench_slow() returns trigger language plpgsql as
  $$ begin perform pg_sleep({DELAY_S}); return null; end $$;
"""
SLOW_TABLE = """
create constraint trigger bench_slow after insert on {table} deferrable initially deferred for each row
  when (current_setting('bench.slept', true) is distinct from pg_current_xact_id()::text
    and set_config('bench.slept', pg_current_xact_id()::text, false) is not null)
  execute function bench_slow();
"""


async def bench(stage: Stage) -> Report:
    """Start each number of processes in turn, and load them with whole transactions."""
    report = Report("processes", "processes: whole transactions over several API processes, 64 connections")
    databases = {"": await stage.database("processes_plain"), ", 3 ms a commit": await stage.database("processes_slow")}
    async with connected(databases[", 3 ms a commit"]) as connection:
        await connection.execute(SLOW_COMMITS + SLOW_TABLE.format(table="half") + SLOW_TABLE.format(table="op"))
    found: dict[str, list[float]] = defaultdict(list)
    numbers = WORKERS_QUICK if stage.quick else WORKERS
    async with receiving() as receiver:
        for _ in range(stage.seconds(3)):
            for workers in numbers:
                for slow, dsn in databases.items():
                    async with AsyncExitStack() as stack:
                        service = await stack.enter_async_context(halfnote(stage, dsn, receiver, workers=workers))
                        done = await load(stage.place, service, "whole", stage.seconds(5), fill=partial(fill_ours, dsn))
                        found[_name(workers, slow)].append(done.rate / 2)
    for slow in databases:
        for workers in numbers:
            name, base = _name(workers, slow), _name(1, slow)
            report.add(name, median(found[name]), "transactions/s", ratio_to=None if workers == 1 else base)
    await stage.drop("processes_plain", "processes_slow")
    return report


def _name(workers: int, slow: str) -> str:
    return f"{workers} process{'es' if workers > 1 else ''}{slow}"
