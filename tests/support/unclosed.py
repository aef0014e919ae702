"""Names the tests that may have left something open.

What a test leaves open is found by a later collection of garbage, and the test of that moment fails for it. The report
of such a failure names the tests since the full collection before.
"""

import gc
from collections.abc import Generator
from typing import Any

import pytest

FOUND_LATER = "PytestUnraisableExceptionWarning"
# The tests since the last full collection, and those between the last two.
_since: list[str] = []
_before: list[str] = []


def _collected(phase: str, info: dict[str, Any]) -> None:
    if phase == "start" and info["generation"] == 2:
        _before[:] = _since
        # The test that runs now.
        del _since[:-1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the names to the report of a test that found something open."""
    report = yield
    if call.when == "setup":
        _since.append(item.nodeid)
    if report.failed and FOUND_LATER in str(report.longrepr):
        report.sections.append(("One of these tests may have left it open", "\n".join([*_before, "---", *_since])))
    return report


gc.callbacks.append(_collected)
