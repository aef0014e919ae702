"""Which tests belong to which run."""

import gc
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import tests.conftest
from tests.support import slow_tests
from tests.support.selection import (
    DAYS,
    MARKS,
    excludes,
    marks_of,
    pytest_runtest_setup,
    pytest_terminal_summary,
    rotated,
    spread,
)

TESTS = Path(__file__).parents[1]


def test_every_file_and_test_that_is_named_exists() -> None:
    for places in MARKS.values():
        for place in places:
            assert (TESTS / place).exists(), place
    for named in (slow_tests.TESTS, slow_tests.CASES):
        for file, names in named.items():
            # Python's parser takes seconds for all files.
            there = set(re.findall(r"^ *(?:async )?def (\w+)\(", (TESTS / file).read_text(), re.MULTILINE))
            assert {name.partition("[")[0] for name in names} <= there, (
                f"tests/support/slow_tests.py names tests that {file} does not have"
            )


@pytest.mark.slow
def test_every_case_that_is_named_exists() -> None:
    cases = {f"tests/{file}::{name}" for file, names in slow_tests.TESTS.items() for name in names if "[" in name}
    many = {f"tests/{file}::{name}": quick for file, of in slow_tests.CASES.items() for name, quick in of.items()}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
    ]
    files = sorted({case.partition("::")[0] for case in (*cases, *many)})
    collected = subprocess.run([*command, *files], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    there = collected.stdout.splitlines()
    assert cases <= set(there)
    counted = Counter(line.partition("[")[0] for line in there)
    assert [name for name, quick in many.items() if counted[name] <= quick] == []


def test_garbage_of_tests_is_collected_and_what_was_collected_with_them_is_left_alone() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    assert not any(found is tests.conftest for found in gc.get_objects())


@pytest.mark.parametrize(
    ("number", "quick", "which"),
    [(32, 4, {0, 9, 18, 27}), (9, 3, {0, 4, 8}), (4, 1, {0}), (5, 2, {0, 3}), (2, 2, {0, 1}), (1, 3, {0})],
)
def test_quick_cases_are_spread_over_all(number: int, quick: int, which: set[int]) -> None:
    assert spread(number, quick) == which


def test_marks_follow_from_the_path() -> None:
    assert marks_of("relay/test_loop.py") == set()
    assert marks_of("destinations/test_nats.py") == {"broker"}
    assert marks_of("spark/test_report.py") == {"spark"}
    assert marks_of("system/test_images.py") == {"slow", "full"}


@pytest.mark.parametrize(
    ("expression", "marks", "excluded"),
    [
        ("", {"slow"}, False),
        ("not slow", {"slow"}, True),
        ("not slow", {"broker"}, False),
        ("not slow and not broker", {"broker"}, True),
        # A test in the file may have the mark.
        ("slow", set(), False),
        ("slow or hypothesis", {"spark"}, False),
    ],
)
def test_a_file_is_left_out_if_none_of_its_tests_can_be_meant(expression: str, marks: set[str], excluded: bool) -> None:
    assert excludes(expression, marks) is excluded


def test_in_a_week_each_part_of_the_list_comes_first_once() -> None:
    files = [f"test_{number:02}.py" for number in range(40)]
    orders = [rotated(files, day) for day in range(20_000, 20_000 + DAYS)]
    assert all(sorted(order) == files for order in orders)
    part = -(-len(files) // DAYS)
    assert {file for order in orders for file in order[:part]} == set(files)


def test_a_test_that_begins_too_late_is_listed_as_not_reached(tmp_path: Path) -> None:
    # The hooks alone: the rest of tests/conftest.py imports the service, which takes seconds.
    for hook in (pytest_runtest_setup, pytest_terminal_summary):
        assert getattr(tests.conftest, hook.__name__) is hook
    imported = (
        f"from tests.support.selection import {pytest_runtest_setup.__name__}, {pytest_terminal_summary.__name__}"
    )
    (tmp_path / "conftest.py").write_text(imported)
    (tmp_path / "test_late.py").write_text("def test_late(): raise AssertionError")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    environment = {
        **os.environ,
        "HALFNOTE_TEST_UNTIL": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(TESTS.parent),
    }
    outcome = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout
    assert "0 tests were run, 1 were not reached" in outcome.stdout
    assert "not reached: test_late.py (1)" in outcome.stdout


CUT = """
import os, pathlib, subprocess, sys, time

def test_cut(data_dir):
    left = subprocess.Popen(["sleep", "300"], start_new_session=True)
    note = pathlib.Path(os.environ["NOTE"])
    note.with_suffix(".new").write_text(f"{left.pid} {data_dir.parent}")
    note.with_suffix(".new").rename(note)
    time.sleep(300)
"""


def test_a_run_that_is_killed_in_the_middle_of_a_test_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "test_cut.py").write_text(CUT)
    note = tmp_path / "note"
    options = ["-p", "tests.support.postgres", "-p", "no:schemathesis", "-p", "no:cacheprovider", "-c", os.devnull]
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path / "test_cut.py")],
        cwd=TESTS.parent,
        env={**os.environ, "NOTE": str(note)},
        stdout=subprocess.DEVNULL,
    )
    try:
        _until(note.exists)
    finally:
        run.kill()
        run.wait()
    pid, directory = note.read_text().split()
    _until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    _until(lambda: not Path(directory).exists())


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
