"""Which worker of xdist runs which test: all tests of the proof run in one process, so that there is one Spark session.

Tests that share what takes seconds to make, as a service, run in one process too. Otherwise each worker makes it.

xdist's own groups write the group's name into the test's id, which pytest 9.2 no longer allows: the marks then have no
effect, and each worker starts its own session. So the path determines the group.
"""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    "tests/spark/": "spark",
    "tests/helm/test_cluster.py": "kube",
    "tests/helm/test_examples.py": "kube",
    "tests/helm/test_executors.py": "kube",
    # One RocketMQ.
    "tests/rocketmq/test_comparison.py": "rocketmq",
    "tests/rocketmq/test_compared_answers.py": "rocketmq",
    # One service, and one more for the tests that delete what others make.
    "tests/cli/test_apply.py": "command line, apply",
    "tests/cli/": "command line",
    # One service, gateway, wheel, or database with keys for each file.
    **{
        f"tests/{file}": file
        for file in (
            "admission/test_authorization.py",
            "admission/test_request_guard.py",
            "helm/test_apply.py",
            "lifecycle/test_wheel.py",
            "rocketmq/test_server.py",
            "routers/test_api_keys.py",
            "routers/test_batches.py",
            "routers/test_destination_schemas.py",
            "routers/test_health.py",
            "routers/test_list_orders.py",
            "routers/test_producer_groups.py",
            "routers/test_put_changes.py",
            "routers/test_redelivery.py",
            "routers/test_subscriptions.py",
            "routers/test_transaction_lists.py",
            "sdk/test_client_pages.py",
            "server/test_fast_cycle.py",
            "server/test_raw_forms.py",
            "server/test_request_pipeline.py",
            "server/test_requests_without_task.py",
            "server/test_tls.py",
        )
    },
    # One service and one browser.
    "tests/console/test_screens.py": "screens",
    "tests/console/test_browser.py": "browser",
    "tests/console/test_live_pages.py": "browser of live pages",
    "tests/console/test_oidc_browser.py": "browser of an issuer",
    "tests/console/test_proof_pages.py": "browser of a proof",
}


class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
    """Sends each test to any free worker, and all tests below a directory of GROUPS to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return next((group for directory, group in GROUPS.items() if nodeid.startswith(directory)), nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByGroup | None:
    """xdist's hook; None leaves it to `--dist`."""
    return ByGroup(config, log) if config.getoption("dist") == "loadgroup" else None
