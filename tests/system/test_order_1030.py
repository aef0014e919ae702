"""`make demo-compare`: what befalls orders, how it is counted, and (slow) the whole comparison with its processes."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.order_1030.acts import Outcome
from examples.order_1030.counting import Counts, Entry, counted
from examples.order_1030.plan import FIRST, fewest, plan
from examples.order_1030.slow_act import Slowness
from examples.order_1030.stories import SHOP
from examples.order_1030.table import LEGEND, Column, table_of
from examples.order_1030.ways import HALFNOTE, WAYS
from tests.support.processes import ROOT

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
CLEAN = Counts(saved=100, announced=100, lost=0, invented=0, twice=0, early=0, by_hand=0)


def entries(*numbers: int, after_s: float = 1) -> list[Entry]:
    return [Entry(number, NOON + timedelta(seconds=after_s)) for number in numbers]


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.name)
def test_a_service_dies_at_each_of_its_ways_steps(way: Any) -> None:
    for count in (fewest(way.steps), 200):
        orders = [placed for group in plan(count, way.steps, SHOP.consumers) for placed in group]
        assert [placed.number for placed in orders] == list(range(FIRST, FIRST + count))
        assert {placed.dies_at for placed in orders} == {*way.steps, None}
    with pytest.raises(ValueError, match="orders are too few"):
        plan(fewest(way.steps) - 1, way.steps, SHOP.consumers)


@pytest.mark.parametrize("consumers", [SHOP.consumers, ("bank-b",)])
@pytest.mark.parametrize("count", [48, 60, 200, 201])
def test_each_consumer_goes_down_comes_back_and_fails_to_answer_once_at_least(
    count: int, consumers: tuple[str, ...]
) -> None:
    orders = [placed for group in plan(count, HALFNOTE.steps, consumers) for placed in group]
    downs = {placed.down: placed.number for placed in orders if placed.down}
    ups = {placed.up: placed.number for placed in orders if placed.up}
    assert downs.keys() == ups.keys() == set(consumers)
    assert all(downs[consumer] < ups[consumer] for consumer in consumers)
    assert {placed.unanswered_by for placed in orders} >= set(consumers)
    for befallen in ("too_much", "refused_by_commit", "without_account"):
        assert any(getattr(placed, befallen) for placed in orders)
    assert not any(placed.dies_at and (placed.too_much or placed.refused_by_commit) for placed in orders)


def test_the_same_orders_meet_the_same_in_every_way() -> None:
    plans = [plan(200, way.steps, SHOP.consumers) for way in WAYS.values()]
    died = [[placed.number for group in each for placed in group if placed.dies_at] for each in plans]
    assert all(numbers == died[0] for numbers in died)


def test_what_is_right_counts_as_flawless() -> None:
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
def test_what_is_wrong_is_counted(points: list[Entry], billing: list[Entry], wrong: dict[str, int]) -> None:
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
    for explained in LEGEND.splitlines():
        assert len(explained) <= 120


def test_a_column_is_flawless_only_if_nothing_at_all_went_wrong() -> None:
    outcome = Outcome(CLEAN, 25, 20, 5, 0)
    assert Column(outcome, Slowness(CLEAN, 1.0, 0), outcome, 0).flawless
    assert not Column(outcome, Slowness(CLEAN, 1.0, 1), outcome, 0).flawless
    assert not Column(Outcome(CLEAN, 25, 20, 5, 1), Slowness(CLEAN, 1.0, 0), outcome, 0).flawless
    lost = Counts(**{**vars(CLEAN), "lost": 1})
    assert not Column(outcome, Slowness(lost, 1.0, 0), outcome, 0).flawless


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_halfnotes_column_is_zeros_and_the_others_lose_or_invent(tmp_path: Path) -> None:
    """A short form of `make demo-compare`: the same processes, kills and databases, and fewer orders."""
    figures = tmp_path / "figures.json"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    short = ("--orders=48", "--transfers=48", "--slow-s=3")
    played = subprocess.run(
        [sys.executable, "-m", "examples.order_1030", *short, f"--json={figures}"],
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": str(ROOT / "sdk")},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert played.returncode == 0, played.stdout + played.stderr
    columns: dict[str, Any] = json.loads(figures.read_text())
    assert columns.keys() == WAYS.keys()
    halfnote = columns.pop("halfnote")
    for act in ("orders", "slowness", "transfers"):
        counts = halfnote[act]["counts"]
        assert [counts[name] for name in ("lost", "invented", "twice", "early", "by_hand")] == [0] * 5
        assert counts["announced"] == counts["saved"] > 0
    assert halfnote["orders"]["left"] == halfnote["off_by"] == halfnote["slowness"]["refused"] == 0
    # One at each step; on a very slow machine a check may come first and have the order refused before.
    assert 0 < halfnote["orders"]["deaths"] <= len(HALFNOTE.steps)
    for column in columns.values():
        for act in ("orders", "transfers"):
            assert column[act]["counts"]["lost"] + column[act]["counts"]["invented"] > 0
    assert columns["wsc"]["orders"]["counts"]["invented"] > 0
    assert columns["wcs"]["orders"]["counts"]["lost"] > 0
    assert columns["sw"]["orders"]["counts"]["invented"] > 0
    # It holds all its connections for as long as the broker takes, and its readers get none.
    assert columns["wsc"]["slowness"]["held_s"] > halfnote["slowness"]["held_s"]
    assert columns["wsc"]["slowness"]["refused"] > 0
