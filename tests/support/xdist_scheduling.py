"""Which worker of xdist runs which test: those of the proof all in one process, so that there is one Spark session.

xdist's own groups write the group's name into the test's id, which pytest 9.2 no longer lets them do: their marks say
nothing then, and each worker starts a session of its own. So the path says it.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

GROUPS = {"tests/spark/": "spark", "tests/helm/test_cluster.py": "kube", "tests/helm/test_executors.py": "kube"}


class ByGroup(LoadScopeScheduling):
    """Every test by itself, to whichever worker is free; those below a directory of GROUPS to one."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for directory, group in GROUPS.items() if nodeid.startswith(directory)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup | None:
    """xdist's hook; None leaves it to `--dist`."""
    return ByGroup(config, log) if config.getoption("dist") == "loadgroup" else None
