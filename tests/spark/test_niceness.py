"""What Spark's programs are on their machine: behind the service."""

import os
import subprocess
import sys

import pytest

SHOWN = "import os; from spark.engine.niceness import stand_behind; stand_behind();"
SHOWN += " print(os.getpriority(os.PRIO_PROCESS, 0))"


def niceness(setting: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HALFNOTE_SPARK_NICE"}
    if setting is not None:
        environment["HALFNOTE_SPARK_NICE"] = setting
    return subprocess.run([sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("setting", "least"), [(None, 10), ("15", 15), ("0", 0)])
def test_a_program_runs_at_a_lower_priority_than_the_service(setting: str | None, least: int) -> None:
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness(setting).stdout == f"{max(mine, least)}\n"


@pytest.mark.parametrize("setting", ["-1", "20", "much", ""])
def test_what_is_no_niceness_is_refused(setting: str) -> None:
    refused = niceness(setting)
    assert refused.returncode == 2
    assert "a number from 0 to 19" in refused.stderr
