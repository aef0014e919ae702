"""The cost of 5,000,000 stored transactions and an old snapshot: CPU time per request, in pairs of slices."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from statistics import median

from app.database.connection import Connection
from app.ids import day_bounds, id_ms
from app.migrate import attach_patiently
from app.models import DAY_TABLES
from app.store.retention import days
from bench.filling import fill_ours
from bench.payload import GROUP, TOPIC, half_body, message_of
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, backend_cpu_s, connected, halfnote
from bench.statistic import median_interval
from bench.wrk import load

DAYS = 8
STORED, STORED_QUICK = 5_000_000, 100_000
LEAST = 0.9
# The seeded days must stay until the end of the run.
ENV = {"HALFNOTE_RETENTION_S": str(30 * 86_400)}

# Ids in order of time with random tails, as producers make them; $1: the first ms; $2: ms between two; $3: how many.
SEED_HALVES = """
insert into half (transaction_id, position, producer_group, topic, key, content_type, body, body_digest, born_at,
  first_check_at, digest)
select id, 0, $4, $5, 'customer-' || n % 100000, 'application/json', $6, sha256($6), at, at + interval '6 s',
  sha256(uuid_send(id))
from (
  select n, to_timestamp(ms / 1000.0) as at,
    overlay(overlay(left(lpad(to_hex(ms), 12, '0') || md5(n::text || ms::text), 32) placing '7' from 13)
      placing '8' from 17)::uuid as id
  from (select n, ($1::float8 + n * $2::float8)::bigint as ms from generate_series(0, $3::int - 1) as n) t
) i
"""
SEED_OPS = (
    "insert into op (transaction_id, verdict, source, decided_at) select transaction_id, 1, 0, born_at from {half}"
)
SEED_OUTBOX = """
insert into outbox (transaction_id, position, "offset", topic, key, committed_at)
select transaction_id, position, nextval('outbox_offset'), topic, key, born_at from {half} order by transaction_id
"""
SWEPT = "insert into sweep (name, reached, ran_at) values ('main', $1, $1), ('hourly', $1, $1)"
TABLES = ", ".join(DAY_TABLES)


@dataclass(frozen=True, slots=True)
class Side:
    """The empty or the full side: its database, its service, and a connection that watches the service's backends."""

    name: str
    dsn: str
    service: Service
    watch: Connection


@dataclass(frozen=True, slots=True)
class Slice:
    """CPU µs per request of one slice: of the API, and of the Postgres backends that serve it."""

    api_us: float
    backends_us: float
    rate: float

    @property
    def both_us(self) -> float:
        """API and Postgres together."""
        return self.api_us + self.backends_us


async def bench(stage: Stage) -> Report:
    """Load an empty and a full database in turn. A snapshot stays open on the full one."""
    stored = STORED_QUICK if stage.quick else STORED
    report = Report("stored", f"stored: {stored:,} transactions over {DAYS} days and an open snapshot, against nothing")
    empty, full = await stage.database("stored_empty"), await stage.database("stored_full")
    await seed(full, stored)
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        sides = []
        for name, dsn in (("stored_empty", empty), ("stored_full", full)):
            service = await stack.enter_async_context(halfnote(stage, dsn, receiver, env=ENV))
            sides.append(Side(name, dsn, service, await stack.enter_async_context(connected(dsn))))
        held = await stack.enter_async_context(connected(full))
        await stack.enter_async_context(held.transaction(isolation="repeatable_read", readonly=True))
        await held.fetchval("select count(*) from lease")
        pairs = await _pairs(stage, *sides)
    _add_figures(report, pairs)
    await stage.drop("stored_empty", "stored_full")
    return report


async def seed(dsn: str, count: int) -> None:
    """Store `count` committed transactions, one message each, evenly over today and the seven days before."""
    started = time.monotonic()
    async with connected(dsn) as connection:
        now: datetime = await connection.fetchval("select clock_timestamp()")
        for ago in range(DAYS):
            day = now.date() - timedelta(days=ago)
            for table in reversed(DAY_TABLES):
                await attach_patiently(connection, table, day)
            await days.add_day(connection, day, now)
        await connection.execute("update day set decided = day < $1", now.date())
        # The state as if a service had run all the time, because a first sweep over all rows is no part of a request.
        await connection.execute(SWEPT, now)
    two = asyncio.Semaphore(2)

    async def fill(ago: int) -> None:
        async with two, connected(dsn) as connection:
            await _seed_day(connection, now.date() - timedelta(days=ago), now, count // DAYS)

    await asyncio.gather(*(fill(ago) for ago in reversed(range(DAYS))))
    async with connected(dsn) as connection:
        await connection.execute("vacuum (analyze)", timeout=600)
        await connection.execute("checkpoint")
    print(f"  {count:,} transactions seeded in {time.monotonic() - started:.0f} s", flush=True)


async def _seed_day(connection: Connection, day: date, now: datetime, count: int) -> None:
    # No caller waits for these rows, and the checkpoint after this writes them to disk.
    await connection.execute("set synchronous_commit = off")
    low, high = (id_ms(bound) for bound in day_bounds(day))
    until = min(high, int(now.timestamp() * 1000) - 600_000)
    body = message_of(half_body())
    half = days.partition_name("half", day)
    await connection.execute(SEED_HALVES, low, max(1, until - low) / count, count, GROUP, TOPIC, body, timeout=600)
    await connection.execute(SEED_OPS.format(half=half), timeout=600)
    await connection.execute(SEED_OUTBOX.format(half=half), timeout=600)


async def _pairs(stage: Stage, empty: Side, full: Side) -> list[tuple[Slice, Slice]]:
    """Return pairs of slices of the empty and the full side. The order within a pair alternates."""
    for side in (empty, full):
        await _slice(stage, side)
    pairs = []
    for turn in range(stage.seconds(20, 2)):
        found = {}
        for side in (empty, full) if turn % 2 == 0 else (full, empty):
            found[side.name] = await _slice(stage, side)
        pairs.append((found[empty.name], found[full.name]))
        # Delete the rows of the slice; otherwise the empty side would fill up.
        await empty.watch.execute(f"truncate {TABLES}")
    return pairs


async def _slice(stage: Stage, side: Side) -> Slice:
    before = await backend_cpu_s(side.watch, side.name)
    done = await load(stage.place, side.service, "whole", stage.seconds(5), fill=partial(fill_ours, side.dsn))
    after = await backend_cpu_s(side.watch, side.name)
    backends_s = sum(cpu_s - before.get(pid, 0.0) for pid, cpu_s in after.items())
    return Slice(done.cpu_us, backends_s / done.requests * 1e6, done.rate)


def _add_figures(report: Report, pairs: list[tuple[Slice, Slice]]) -> None:
    """Add the medians, and compare the cost of a request on the empty database with its cost on the full one."""
    for name, of in (("API", "api_us"), ("Postgres backends", "backends_us"), ("both", "both_us")):
        ratios = [getattr(empty, of) / getattr(full, of) for empty, full in pairs]
        low, high, confidence = median_interval(ratios)
        ratio, base = median(ratios), f"CPU of {name}, empty"
        report.add(base, median([getattr(empty, of) for empty, _ in pairs]), "µs/request")
        report.add(
            f"CPU of {name}, stored", median([getattr(full, of) for _, full in pairs]), "µs/request", ratio_to=base
        )
        report.notes.append(
            f"{name}: empty over stored {ratio:.3f}; {low:.3f} to {high:.3f} holds the median with {confidence:.1%} "
            f"confidence ({len(pairs)} pairs)"
        )
        if of != "backends_us":
            report.hold(f"CPU of {name}: empty over stored", ratio, at_least=LEAST, interval=(low, high))
    report.add("empty", median([empty.rate for empty, _ in pairs]), "requests/s")
    report.add("stored", median([full.rate for _, full in pairs]), "requests/s", ratio_to="empty")
