"""What Spark's programs are on their machine: behind the service."""

import os
import subprocess
import sys

import pytest

SHOWN = "import os; from spark.engine.niceness import stand_behind; stand_behind();"
SHOWN += " print(os.getpriority(os.PRIO_PROCESS, 0))"


def niceness(told: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HALFNOTE_SPARK_NICE"}
    if told is not None:
        environment["HALFNOTE_SPARK_NICE"] = told
    return subprocess.run([sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("told", "least"), [(None, 10), ("15", 15), ("0", 0)])
def test_a_program_stands_behind_the_service_unless_it_does_already(told: str | None, least: int) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness(told).stdout == f"{max(mine, least)}\n"


@pytest.mark.parametrize("told", ["-1", "20", "much", ""])
def test_what_is_no_niceness_is_refused(told: str) -> None:
    refused = niceness(told)
    assert refused.returncode == 2
    assert "a number from 0 to 19" in refused.stderr
