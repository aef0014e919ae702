"""The nightly programs with executors of their own: the chart's CronJobs, on a real API, in containers that do run."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spark.certificate.signing import new_key
from tests.helm.cluster import Cluster
from tests.helm.kubelet import Kubelet, add_node
from tests.helm.programs import CHART, VALUES
from tests.spark.conftest import SMALL
from tests.spark.days import days_ago, fill_day, flip_ops, rows
from tests.support.containers import image
from tests.support.processes import free_port

pytestmark = pytest.mark.timeout(3000)

WITHIN_S = 1200.0
EXECUTORS = 2
# With Spark's defaults, nearly all of the CPU time of so small a day is compilation, in three JVMs.
CHEAP = {
    name: value for name, value in SMALL.items() if name not in ("spark.driver.bindAddress", "spark.driver.host")
} | {"spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:-UsePerfData"}


@pytest.fixture
def kubelet(kube: Cluster, space: str, tmp_path: Path) -> Iterator[Kubelet]:
    """The node that the proof's pods go to."""
    node = f"real-{space}"
    add_node(kube, node)
    made = Kubelet(kube, node, tmp_path)
    yield made
    made.close()


def install(kubelet: Kubelet, space: str, dsn: str) -> None:
    """Install the chart so that the proof's pods go to this node, and all others are played."""
    key = kubelet.directory / "certificate.pem"
    new_key(key)
    secret = ["secret", "generic", "halfnote-certificate", f"--from-file={key}"]
    kubelet.kube.kubectl("create", *secret, "--namespace", space)
    reconciliation = {
        "image": {"repository": image("spark"), "tag": "latest"},
        "nodeSelector": {"kubernetes.io/hostname": kubelet.node},
        "tolerations": [{"operator": "Exists"}],
        "executor": {"instances": EXECUTORS, "cores": 1, "memory": "600m"},
        # Only the test says when: it may well be that time of the night.
        "suspend": True,
        # Pods here share the machine's ports, which others may have.
        "sparkConf": CHEAP
        | {"spark.driver.port": str(free_port()), "spark.driver.blockManager.port": str(free_port())},
    }
    values = next(file for file in VALUES if file.stem == "kubernetes-values")
    given = {"reconciliation": reconciliation, "database": {"url": dsn}}
    (kubelet.directory / "values.json").write_text(json.dumps(given))
    files = ["--values", str(values), "--values", str(kubelet.directory / "values.json")]
    done = kubelet.kube.helm("install", "hn", str(CHART), "--namespace", space, *files, "--wait", "--timeout", "200s")
    assert done.returncode == 0, done.stderr


def run(kubelet: Kubelet, space: str, program: str, name: str) -> dict[str, Any]:
    """Run a CronJob's pods now, to the end; return the condition that the Job came to."""
    kubelet.kube.kubectl("create", "job", name, f"--from=cronjob/hn-halfnote-{program}", "--namespace", space)

    def over() -> Any:
        kubelet.turn()
        job = kubelet.kube.get("job", name, "--namespace", space)
        return [one for one in job["status"].get("conditions", []) if one["type"] in ("Complete", "Failed")]

    condition: dict[str, Any] = until(over, kubelet)[0]
    # Its executors go with it.
    until(lambda: kubelet.turn() or not executors(kubelet, space), kubelet)
    return condition


def until(happened: Callable[[], Any], kubelet: Kubelet) -> Any:
    """Return what `happened` returns, once that is true."""
    deadline = time.monotonic() + WITHIN_S
    while not (found := happened()):
        assert time.monotonic() < deadline, kubelet.logs()
        time.sleep(0.3)
    return found


def executors(kubelet: Kubelet, space: str) -> list[Any]:
    found: list[Any] = kubelet.kube.get("pod", "--namespace", space, "--selector", "spark-role=executor")["items"]
    return found


def test_proof_and_archive_by_executors(kubelet: Kubelet, space: str, dsn: str) -> None:
    day = days_ago(5)
    fill_day(dsn, day, 300)
    install(kubelet, space, dsn)
    ended = run(kubelet, space, "reconcile", "proof")
    assert ended["type"] == "Complete", kubelet.logs()
    assert len(kubelet.started) > 1
    [proved] = rows(dsn, "select engine, state from reconciliation_run")
    assert proved["engine"].startswith("k8s://https://")
    assert proved["state"] == "proved"
    [seen] = rows(dsn, "select state, counts from reconciliation_day where day = %s", day)
    assert seen["state"] == "final"
    assert seen["counts"]["half"] == 300
    [certificate] = rows(dsn, "select document::jsonb as signed from day_certificate where day = %s", day)
    assert certificate["signed"]["signature"] is not None

    ended = run(kubelet, space, "archive", "archive")
    assert ended["type"] == "Complete", kubelet.logs()
    [archived] = rows(dsn, "select archive from day where day = %s", day)
    assert archived["archive"].startswith("file:/archive/"), archived
    written = kubelet.claim(space, "hn-halfnote-archive")
    assert list(written.glob("**/*.parquet"))
    assert list(written.glob("**/manifest.json"))


def test_a_fault_is_found_by_executors_and_not_looked_for_again(kubelet: Kubelet, space: str, dsn: str) -> None:
    fill_day(dsn, days_ago(5), 300)
    flipped = flip_ops(dsn, 3)
    install(kubelet, space, dsn)
    ended = run(kubelet, space, "reconcile", "proof")
    assert (ended["type"], ended["reason"]) == ("Failed", "PodFailurePolicy"), kubelet.logs()
    found = rows(dsn, "select kind from finding where resolved_at is null")
    assert len(found) == len(flipped)
