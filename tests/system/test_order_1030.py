"""`make demo-compare`: the faults of orders, how outcomes are counted, and (slow) the whole comparison."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from examples.order_1030.acts import Outcome
from examples.order_1030.counting import Counts, Entry, counted
from examples.order_1030.plan import AT_ONCE, FIRST, fewest, plan
from examples.order_1030.slow_act import Slowness
from examples.order_1030.stories import SHOP
from examples.order_1030.table import LEGEND, Column, table_of
from examples.order_1030.ways import HALFNOTE, WAYS
from tests.support.processes import ROOT, free_port

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
CLEAN = Counts(saved=100, announced=100, lost=0, invented=0, twice=0, early=0, by_hand=0)


def entries(*numbers: int, after_s: float = 1) -> list[Entry]:
    return [Entry(number, NOON + timedelta(seconds=after_s)) for number in numbers]


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.name)
def test_a_service_dies_at_each_step_of_its_way(way: Any) -> None:
    for count in (fewest(way.steps), 200):
        orders = [order for group in plan(count, way.steps, SHOP.consumers) for order in group]
        assert [order.number for order in orders] == list(range(FIRST, FIRST + count))
        assert {order.dies_at for order in orders} == {*way.steps, None}
    with pytest.raises(ValueError, match="orders are too few"):
        plan(fewest(way.steps) - 1, way.steps, SHOP.consumers)


@pytest.mark.parametrize("consumers", [SHOP.consumers, ("bank-b",)])
@pytest.mark.parametrize("count", [48, 60, 200, 201])
def test_each_consumer_stops_restarts_and_fails_to_answer_at_least_once(count: int, consumers: tuple[str, ...]) -> None:
    orders = [order for group in plan(count, HALFNOTE.steps, consumers) for order in group]
    downs = {order.down: order.number for order in orders if order.down}
    ups = {order.up: order.number for order in orders if order.up}
    assert downs.keys() == ups.keys() == set(consumers)
    assert all(downs[consumer] < ups[consumer] for consumer in consumers)
    assert {order.unanswered_by for order in orders} >= set(consumers)
    for fault in ("too_much", "refused_by_commit", "without_account"):
        assert any(getattr(order, fault) for order in orders)
    assert not any(order.dies_at and (order.too_much or order.refused_by_commit) for order in orders)


def test_the_same_orders_have_the_same_faults_in_every_way() -> None:
    plans = [plan(200, way.steps, SHOP.consumers) for way in WAYS.values()]
    died = [[order.number for group in each for order in group if order.dies_at] for each in plans]
    assert all(numbers == died[0] for numbers in died)


def test_correct_outcomes_count_as_flawless() -> None:
    saved = {1: NOON, 2: NOON}
    counts = counted(saved, {"points": entries(1, 2), "billing": entries(2, 1)})
    assert counts == Counts(saved=2, announced=2, lost=0, invented=0, twice=0, early=0, by_hand=0)
    assert counts.flawless


@pytest.mark.parametrize(
    ("points", "billing", "wrong"),
    [
        (entries(1, 2), entries(1), {"lost": 1}),
        (entries(1), entries(1), {"lost": 1, "announced": 1}),
        (entries(1, 2, 3), entries(1, 2, 3), {"invented": 1, "announced": 3, "by_hand": 2}),
        (entries(1, 2, 1), entries(1, 2, 1, 1), {"twice": 1, "by_hand": 3}),
        (entries(1, 2), entries(1) + entries(2, after_s=-1), {"early": 1}),
        (entries(1, 2, 3, 3), entries(1, 2), {"invented": 1, "twice": 1, "announced": 3, "by_hand": 2}),
    ],
)
def test_wrong_outcomes_are_counted(points: list[Entry], billing: list[Entry], wrong: dict[str, int]) -> None:
    counts = counted({1: NOON, 2: NOON}, {"points": points, "billing": billing})
    right = {"saved": 2, "announced": 2, "lost": 0, "invented": 0, "twice": 0, "early": 0, "by_hand": 0}
    assert vars(counts) == right | wrong
    assert not counts.flawless


def test_the_table_shows_all_figures_in_80_characters() -> None:
    outcome = Outcome(CLEAN, deaths=25, consumer_deaths=20, waiting=5, left=0)
    columns = {way: Column(outcome, Slowness(CLEAN, 50.04, 0), outcome, -120_000) for way in WAYS.values()}
    assert not columns[HALFNOTE].flawless
    console = Console(width=80)
    with console.capture() as printed:
        console.print(table_of(columns, 200, 60, 10))
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= 80
    shown = {line[:28].strip(): line[28:].split() for line in lines}
    assert shown["connection-seconds held"] == ["50.0"] * 4
    assert shown["sum of accounts: off by"] == ["-120,000"] * 4
    assert shown["waiting for a person"] == ["5", "→", "0"] * 4
    for explanation in LEGEND.splitlines():
        assert len(explanation) <= 120


def test_a_column_is_flawless_only_without_any_fault() -> None:
    outcome = Outcome(CLEAN, 25, 20, 5, 0)
    assert Column(outcome, Slowness(CLEAN, 1.0, 0), outcome, 0).flawless
    assert not Column(outcome, Slowness(CLEAN, 1.0, 1), outcome, 0).flawless
    assert not Column(Outcome(CLEAN, 25, 20, 5, 1), Slowness(CLEAN, 1.0, 0), outcome, 0).flawless
    lost = Counts(**{**vars(CLEAN), "lost": 1})
    assert not Column(outcome, Slowness(lost, 1.0, 0), outcome, 0).flawless


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "begun", "sent", "trapped"),
    [
        ("examples.order_1030", "halfnote-compare-*/services/postgres/cluster", "SIGHUP", ""),
        ("examples.order_1030", "halfnote-compare-*/*.points.log", "SIGTERM", ""),
        # As a shell starts a program in the background.
        ("examples.order_1030", "halfnote-compare-*/*.points.log", "SIGTERM", 'trap "" INT;'),
        ("demo", "halfnote-demo-*/halfnote/postgres/cluster", "SIGTERM", 'trap "" INT;'),
    ],
)
def test_a_signal_ends_every_process_and_deletes_the_files(
    data_dir: Path, program: str, begun: str, sent: str, trapped: str
) -> None:
    temporary = data_dir.parent / "temporary"
    temporary.mkdir(mode=0o755)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    marked = {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT / "sdk"), "HALFNOTE_PORT": str(free_port())}
    command = ["sh", "-c", f'{trapped} exec "$0" "$@"', sys.executable, "-m", program]
    with subprocess.Popen(command, cwd=ROOT, env=inherited | marked) as running:
        try:
            wait_until(lambda: running.poll() is not None or [*temporary.glob(begun)])
            running.send_signal(signal.Signals[sent])
            assert running.wait(120) == 128 + signal.SIGTERM
            wait_until(lambda: not processes_of(temporary))
            assert [*temporary.iterdir()] == []
        finally:
            for process in processes_of(temporary):
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def processes_of(temporary: Path) -> list[psutil.Process]:
    """Return the processes that a test's program started, by the directory in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(temporary):
                found.append(process)
    return found


def wait_until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_halfnotes_column_is_zeros_and_the_others_lose_or_invent(tmp_path: Path) -> None:
    """A short form of `make demo-compare`: the same processes, kills and databases, and fewer orders."""
    figures = tmp_path / "figures.json"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    short = ("--orders=48", "--transfers=48", "--slow-s=3")
    completed = subprocess.run(
        [sys.executable, "-m", "examples.order_1030", *short, f"--json={figures}"],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    columns: dict[str, Any] = json.loads(figures.read_text())
    assert columns.keys() == WAYS.keys()
    halfnote = columns.pop("halfnote")
    for part in ("orders", "slowness", "transfers"):
        counts = halfnote[part]["counts"]
        assert [counts[name] for name in ("lost", "invented", "twice", "early", "by_hand")] == [0] * 5
        assert counts["announced"] == counts["saved"] > 0
    assert halfnote["orders"]["left"] == halfnote["off_by"] == halfnote["slowness"]["refused"] == 0
    # One death in every other group; on a very slow machine a check may run first, and the order is refused before it.
    assert 0 < halfnote["orders"]["deaths"] <= 48 // (2 * AT_ONCE)
    for column in columns.values():
        for part in ("orders", "transfers"):
            assert column[part]["counts"]["lost"] + column[part]["counts"]["invented"] > 0
    assert columns["wsc"]["orders"]["counts"]["invented"] > 0
    assert columns["wcs"]["orders"]["counts"]["lost"] > 0
    assert columns["sw"]["orders"]["counts"]["invented"] > 0
    # This way holds all its connections while the broker is slow, and its readers get none.
    assert columns["wsc"]["slowness"]["held_s"] > halfnote["slowness"]["held_s"]
    assert columns["wsc"]["slowness"]["refused"] > 0
