"""`make demo-compare`: runs both stories in all four ways and prints one table.

The exit code is 0 only if Halfnote's column has no errors.
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import structlog
from rich.console import Console

from app.embedded_postgres import EmbeddedPostgres
from demo.processes import StepFailed, orderly_end, own_halfnote
from examples.order_1030.acts import Outcome, crashes
from examples.order_1030.bank import CAPITAL
from examples.order_1030.counting import read_sum
from examples.order_1030.plan import fewest
from examples.order_1030.programs import preload
from examples.order_1030.slow import SlowWay
from examples.order_1030.slow_act import Slowness, slow_answers
from examples.order_1030.stage import Servers, staged
from examples.order_1030.stories import BANK, SHOP
from examples.order_1030.table import LEGEND, Column, table_of
from examples.order_1030.ways import HALFNOTE, WAYS, Way

# For comparing commit times with consumers' entries.
SETTINGS = {"track_commit_timestamp": "on", "max_connections": "300"}

console = Console(highlight=False)


def main() -> int:
    """Run and print; return the exit code."""
    given = _options().parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    preload()
    try:
        with orderly_end(), servers() as found:
            columns = asyncio.run(compare(found, given.orders, given.transfers, given.slow_s))
    except (StepFailed, TimeoutError, httpx.HTTPError) as error:
        print(f"\nThe comparison failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    console.print(table_of(columns, given.orders, given.transfers, given.slow_s))
    console.print(LEGEND)
    if given.json is not None:
        given.json.write_text(json.dumps({way.name: asdict(column) for way, column in columns.items()}, indent=2))
    if columns[HALFNOTE].flawless:
        return 0
    print("\nHalfnote lost, invented or repeated something. That is a bug.", file=sys.stderr)
    return 1


@contextmanager
def servers() -> Iterator[Servers]:
    """Run a Halfnote and a Postgres server for the services' own databases; both are deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="halfnote-compare-") as directory:
        # If this program runs as root, Postgres runs as another user, which must reach the directory.
        Path(directory).chmod(0o755)
        console.print("Starting Halfnote, and a Postgres for the databases of the services ...")
        postgres = EmbeddedPostgres.start(Path(directory) / "services", settings=SETTINGS)
        try:
            with own_halfnote() as url:
                yield Servers(url, postgres.url, Path(directory))
        finally:
            postgres.stop()


async def compare(found: Servers, orders: int, transfers: int, slow_s: float) -> dict[Way, Column]:
    """Run everything; return the results of each way."""
    shops, banks = {}, {}
    for way in WAYS.values():
        shops[way] = await play_orders(found, way, orders)
        banks[way] = await play_transfers(found, way, transfers)
    slowness = await play_slowness(found, slow_s)
    return {way: Column(shops[way], slowness[way], *banks[way]) for way in WAYS.values()}


async def play_orders(found: Servers, way: Way, count: int) -> Outcome:
    """Run the first story."""
    async with staged(found, SHOP, way, act="shop") as stage:
        with timed(f"{way.title} ({way.order}): {count} orders") as report_progress:
            outcome = await crashes(stage, count, report_progress)
    return outcome


async def play_transfers(found: Servers, way: Way, count: int) -> tuple[Outcome, int]:
    """Run the second story; also return the difference of the sum of all accounts."""
    async with staged(found, BANK, way, act="bank") as stage:
        with timed(f"{way.title} ({way.order}): {count} transfers") as report_progress:
            outcome = await crashes(stage, count, report_progress)
        total = await read_sum(stage.databases["own"]) + await read_sum(stage.databases["bank-b"])
    return outcome, total - CAPITAL


async def play_slowness(found: Servers, slow_s: float) -> dict[Way, Slowness]:
    """Run with a slow broker, in all ways at once."""
    target = httpx.URL(found.halfnote).port
    assert target is not None
    ready = asyncio.Barrier(len(WAYS) + 1)
    async with SlowWay(target).open() as slow:
        with timed(f"All ways at once: the broker takes {slow_s:g} s to answer"):
            playing = (slow_answers(found, way, slow, slow_s, ready) for way in WAYS.values())
            outcomes, _ = await asyncio.gather(asyncio.gather(*playing), _slow_down(slow, slow_s, ready))
    return dict(zip(WAYS.values(), outcomes, strict=True))


async def _slow_down(slow: SlowWay, slow_s: float, ready: asyncio.Barrier) -> None:
    await ready.wait()
    slow.flowing.clear()
    await ready.wait()
    await asyncio.sleep(slow_s)
    slow.flowing.set()


@contextmanager
def timed(what: str) -> Iterator[Callable[[int], None]]:
    """Print the current step, its progress on a terminal, and its duration at the end."""
    began = time.monotonic()
    with console.status(what) as status:
        yield lambda done: status.update(f"{what}: {done} placed")
    console.print(f"{what}: {time.monotonic() - began:.0f} s")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("examples.order_1030", description="Orders and transfers, announced in four ways.")
    least = fewest(HALFNOTE.steps)
    parser.add_argument("--orders", type=int, default=200, help=f"at least {least}")
    parser.add_argument("--transfers", type=int, default=60, help=f"at least {least}")
    parser.add_argument("--slow-s", type=float, default=10.0, help="how long the broker takes to answer")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
