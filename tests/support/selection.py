"""Which tests belong to which run: marks by folder and file, in one place.

`make test` leaves out the mark `slow`; `make test-fast` leaves out `broker`, `spark` and `full` as well; `make
test-all` runs everything. A file whose marks exclude it is not even imported: collecting costs each worker CPU time.
A slow test in a quick file is named in `slow_tests.py`, or has `@pytest.mark.slow` of its own; a slow case of a test is
named with its parameters, as in `test_name[parameters]`. `slow_tests.CASES` says how many cases of a test are quick.

Two environment variables serve `.ci/run`. `HALFNOTE_TEST_ROTATION`: a whole number, the day; each day the run begins
a seventh of the list of files later than the day before. `HALFNOTE_TEST_UNTIL`: seconds since 1970; a test that has
not begun by then is not run, and the summary lists it as not reached. No test is cut in the middle.
"""

import functools
import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import pytest
from _pytest.mark.expression import Expression
from hypothesis import is_hypothesis_test

from tests.support import slow_tests

# Folders (with a slash at the end) and files below tests/.
MARKS: dict[str, tuple[str, ...]] = {
    "slow": slow_tests.FILES,
    "broker": (
        "destinations/test_kafka.py",
        "destinations/test_nats.py",
        "destinations/test_rabbitmq.py",
        "destinations/test_redis.py",
        "relay/test_brokers.py",
        "spark/test_ledger_topics.py",
    ),
    "spark": ("spark/",),
    # Tests that an edit seldom breaks or that take seconds: whole services and other programs, the client,
    # rules of the repository, query plans.
    "full": (
        "checkback/test_announcements.py",
        "cli/",
        "console/test_plans.py",
        "console/test_screens.py",
        "coordinator/test_new_day_plans.py",
        "coordinator/test_statement_plans.py",
        "helm/",
        "lifecycle/",
        "project/",
        "relay/test_kills.py",
        "relay/test_plans.py",
        "relay/test_shards.py",
        "retention/test_archive_check.py",
        "rocketmq/test_clients.py",
        "rocketmq/test_server.py",
        "routers/test_dead_letter_plans.py",
        "sdk/",
        "secrets/test_vault.py",
        "system/",
    ),
}
DAYS = 7
NOT_REACHED = "not reached: no time was left"

_TESTS = Path(__file__).parents[1]


def marks_of(path: str) -> set[str]:
    """Return the marks of a test file, named relative to tests/."""
    return {
        mark
        for mark, places in MARKS.items()
        if any(path == place or (place.endswith("/") and path.startswith(place)) for place in places)
    }


def excludes(expression: str, marks: Iterable[str]) -> bool:
    """Return whether an expression of `-m` leaves out a test with these marks, whatever other marks it has as well."""
    if not expression:
        return False
    compiled, others = Expression.compile(expression), sorted(MARKS.keys() - set(marks))
    possible = itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(others) + 1))
    sets = [{*marks, *more} for more in possible]
    return not any(compiled.evaluate(lambda name, /, names=names, **_: name in names) for names in sets)


def rotated(files: Sequence[str], day: int) -> list[str]:
    """Return the files in the order of a day: from the part of that day to the end, then from the beginning."""
    start = len(files) * (day % DAYS) // DAYS
    return [*files[start:], *files[:start]]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that `-m` excludes as a whole, before they are imported."""
    path = _relative(collection_path)
    if path is None or not path.endswith(".py"):
        return None
    return True if excludes(config.option.markexpr, marks_of(path)) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their path, before `-m` is applied, and order them by the day if one is named."""
    for item in items:
        path, marks = _path_and_marks(item.path)
        for mark in marks:
            item.add_marker(mark)
        case = item.nodeid.partition("::")[2]
        if {case, case.partition("[")[0]} & set(slow_tests.TESTS.get(path, ())):
            item.add_marker("slow")
    for item in _cases_too_many(items):
        item.add_marker("slow")
    day = os.environ.get("HALFNOTE_TEST_ROTATION")
    if day:
        # Hypothesis adds its mark after this hook.
        rest = (item for item in items if item.get_closest_marker("slow") or is_property_test(item))
        files = list(dict.fromkeys(str(item.path) for item in rest))
        place = {file: number for number, file in enumerate(rotated(files, int(day)))}
        items.sort(key=lambda item: place.get(str(item.path), len(place)))


def spread(number: int, quick: int) -> set[int]:
    """Return which of a number of cases are quick: so many, the first among them, spread over all.

    The step has no divisor in common with the number, or all would have the same value of a parameter.
    """
    step = next(step for step in itertools.count(-(-number // quick)) if math.gcd(step, number) == 1)
    return {index * step % number for index in range(min(quick, number))}


def is_property_test(item: pytest.Item) -> bool:
    """Return whether Hypothesis generates a test's examples."""
    return isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record pytest's exit status for scripts/failed-once-more, because make has one status for all failures."""
    cache = getattr(session.config, "cache", None)
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set("halfnote/exit_status", int(exitstatus))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Begin no test after the time that HALFNOTE_TEST_UNTIL names."""
    until = os.environ.get("HALFNOTE_TEST_UNTIL")
    if until and time.time() >= float(until):
        pytest.skip(NOT_REACHED)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which files ran and which tests were not reached, if the time was limited."""
    if not os.environ.get("HALFNOTE_TEST_UNTIL"):
        return
    reports = [report for kind in terminalreporter.stats.values() for report in kind if hasattr(report, "when")]
    missed = sorted({report.nodeid for report in reports if NOT_REACHED in str(report.longrepr)})
    ran = sorted({report.nodeid for report in reports if report.when == "call"})
    terminalreporter.section(f"{len(ran)} tests were run, {len(missed)} were not reached")
    for title, tests in (("run", ran), ("not reached", missed)):
        for file, of_file in itertools.groupby(tests, key=lambda test: test.partition("::")[0]):
            terminalreporter.write_line(f"{title}: {file} ({len(list(of_file))})")


def _cases_too_many(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases beyond the number that `slow_tests.CASES` has for their test."""
    tests: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        path, _ = _path_and_marks(item.path)
        name = item.nodeid.partition("::")[2].partition("[")[0]
        if name in slow_tests.CASES.get(path, ()) and item.get_closest_marker("slow") is None:
            tests.setdefault((path, name), []).append(item)
    for (path, name), cases in tests.items():
        quick = spread(len(cases), slow_tests.CASES[path][name])
        yield from (case for index, case in enumerate(cases) if index not in quick)


@functools.cache
def _path_and_marks(path: Path) -> tuple[str, set[str]]:
    """Return a file's name relative to tests/, and its marks; a file has many tests."""
    relative = _relative(path) or ""
    return relative, marks_of(relative)


def _relative(path: Path) -> str | None:
    try:
        return str(PurePosixPath(path.relative_to(_TESTS)))
    except ValueError:
        return None
