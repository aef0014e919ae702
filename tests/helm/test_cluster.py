"""The chart on a real Kubernetes API: every object accepted strictly, installed, upgraded, rolled back, uninstalled."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyspark
import pytest
import yaml

from tests.helm.cluster import Cluster
from tests.helm.kubelet import add_node
from tests.helm.programs import CHART, VALUES, rendered
from tests.support.requirements import absent

EACH = pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem.removesuffix("-values"))
WITHIN_S = 200.0
# Where Spark's driver listens that a test starts on this machine.
DRIVER = "127.0.1.1"


def until(happened: Callable[[], Any], what: str) -> Any:
    """Return what `happened` returns, once that is true."""
    deadline = time.monotonic() + WITHIN_S
    while not (found := happened()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.3)
    return found


def installed(kube: Cluster, space: str, values: Path, *more: str) -> None:
    """Install the chart as `hn`, and wait for its pods."""
    names = ["install", "hn", str(CHART), "--namespace", space, "--values", str(values)]
    done = kube.helm(*names, "--wait", "--timeout", f"{WITHIN_S:.0f}s", *more)
    assert done.returncode == 0, done.stderr


@EACH
def test_the_api_accepts_every_object_strictly(kube: Cluster, space: str, values: Path) -> None:
    objects = [document for document in yaml.safe_load_all(rendered(values)) if document]
    for one in objects:
        one["metadata"]["namespace"] = space
    text = "\n---\n".join(json.dumps(one) for one in objects)
    said = kube.kubectl("create", "--dry-run=server", "--validate=strict", "--filename", "-", stdin=text)
    assert len(said.splitlines()) == len(objects)


@EACH
def test_helm_installs_it_for_trial_on_the_server(kube: Cluster, space: str, values: Path) -> None:
    done = kube.helm("install", "hn", str(CHART), "--namespace", space, "--values", str(values), "--dry-run=server")
    assert done.returncode == 0, done.stderr


def test_a_wrong_field_would_not_be_accepted(kube: Cluster, space: str) -> None:
    with pytest.raises(AssertionError, match="unknown field"):
        kube.kubectl(
            *("create", "--dry-run=server", "--validate=strict", "--namespace", space, "--filename", "-"),
            stdin=json.dumps(
                {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"porrts": [{"port": 1}]}}
            ),
        )


@EACH
def test_it_is_installed_upgraded_rolled_back_and_uninstalled(kube: Cluster, space: str, values: Path) -> None:
    installed(kube, space, values)
    before = secrets(kube, space)
    own = "halfnote-secrets" not in values.read_text()
    assert ("hn-halfnote-keys" in before) is own
    kept = ["--namespace", space, "--reuse-values", "--wait", "--timeout", f"{WITHIN_S:.0f}s"]
    done = kube.helm(
        "upgrade", "hn", str(CHART), *kept, "--set", "image.tag=9.9.9", "--set", "shutdown.drainSeconds=30"
    )
    assert done.returncode == 0, done.stderr
    api = kube.get("deployment", "hn-halfnote-api", "--namespace", space)
    assert api["spec"]["template"]["spec"]["containers"][0]["image"] == "halfnote:9.9.9"
    assert api["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 50
    assert secrets(kube, space) == before
    done = kube.helm("rollback", "hn", "1", "--namespace", space, "--wait", "--timeout", f"{WITHIN_S:.0f}s")
    assert done.returncode == 0, done.stderr
    api = kube.get("deployment", "hn-halfnote-api", "--namespace", space)
    assert api["spec"]["template"]["spec"]["containers"][0]["image"] == "halfnote:0.1.0"
    assert secrets(kube, space) == before
    done = kube.helm("uninstall", "hn", "--namespace", space, "--wait")
    assert done.returncode == 0, done.stderr
    assert secrets(kube, space) == {name: data for name, data in before.items() if name != "hn-halfnote-database"}
    assert kube.get("deployment,cronjob,service,networkpolicy", "--namespace", space)["items"] == []
    claims = {claim["metadata"]["name"] for claim in kube.get("pvc", "--namespace", space)["items"]}
    kinds = {document["kind"]: document for document in yaml.safe_load_all(rendered(values)) if document}
    if "hn-halfnote-archive" in json.dumps(kinds.get("PersistentVolumeClaim")):
        assert "hn-halfnote-archive" in claims


def secrets(kube: Cluster, space: str) -> dict[str, dict[str, str]]:
    """The namespace's Secrets, but for Helm's own."""
    return {
        secret["metadata"]["name"]: secret["data"]
        for secret in kube.get("secret", "--namespace", space)["items"]
        if secret["type"] == "Opaque"
    }


def test_what_was_generated_outlives_the_release(kube: Cluster, space: str) -> None:
    tryout = next(file for file in VALUES if file.stem == "tryout-values")
    installed(kube, space, tryout)
    before = secrets(kube, space)
    key = base64.b64decode(before["hn-halfnote-keys"]["admin-key"]).decode()
    assert key.startswith("hn_")
    assert len(key) == 66
    assert kube.helm("uninstall", "hn", "--namespace", space, "--wait").returncode == 0
    installed(kube, space, tryout, "--take-ownership")
    assert secrets(kube, space) == before


def test_the_migration_comes_before_anything_serves(kube: Cluster, space: str) -> None:
    values = next(file for file in VALUES if file.stem == "kubernetes-values")
    # No node takes the hook's pod, so it never ends.
    nowhere = ["--set-string", "migration.nodeSelector.nowhere=true", "--set", "migration.activeDeadlineSeconds=5"]
    names = ["install", "hn", str(CHART), "--namespace", space, "--values", str(values), *nowhere]
    done = kube.helm(*names, "--timeout", f"{WITHIN_S:.0f}s")
    assert done.returncode != 0
    assert "pre-install" in done.stderr
    assert kube.get("deployment", "--namespace", space)["items"] == []


def test_the_migration_has_its_policy_and_its_account_before_the_release(kube: Cluster, space: str) -> None:
    values = next(file for file in VALUES if file.stem == "kubernetes-values")
    # No node takes the hook's pod until the test has looked at what is there.
    nowhere = ["--set-string", "migration.nodeSelector.nowhere=true"]
    names = ["install", "hn", str(CHART), "--namespace", space, "--values", str(values), *nowhere]
    with ThreadPoolExecutor(1) as other:
        installing = other.submit(kube.helm, *names, "--timeout", f"{WITHIN_S:.0f}s")
        try:
            [pod] = until(lambda: migrating(kube, space), "the migration has a pod")
            [policy] = kube.get("networkpolicy", "--namespace", space)["items"]
        finally:
            deadline = json.dumps({"spec": {"activeDeadlineSeconds": 1}})
            kube.kubectl("patch", "job", "hn-halfnote-migrate", "--namespace", space, "--patch", deadline)
        assert "pre-install" in installing.result().stderr
    assert pod["spec"]["serviceAccountName"] == "hn-halfnote-migrate"
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [53, 53, 5353, 5353, 5432]
    assert kube.get("networkpolicy", "--namespace", space)["items"] == []


def migrating(kube: Cluster, space: str) -> list[dict[str, Any]]:
    labels = "app.kubernetes.io/component=migrate"
    found: list[dict[str, Any]] = kube.get("pod", "--namespace", space, "--selector", labels)["items"]
    return found


@pytest.mark.parametrize(("status", "again"), [(1, True), (2, False), (3, False)])
def test_a_proof_that_found_something_is_not_run_again(kube: Cluster, space: str, status: int, again: bool) -> None:
    tryout = next(file for file in VALUES if file.stem == "tryout-values")
    # On a node that kwok does not play, so that the test says how the pod ends.
    node = f"slow-{space}"
    add_node(kube, node)
    where = {"nodeSelector": {"kubernetes.io/hostname": node}, "tolerations": [{"operator": "Exists"}]}
    installed(kube, space, tryout, "--set-json", f"reconciliation={json.dumps({'engine': 'local', **where})}")
    kube.kubectl("create", "job", "proof", "--from=cronjob/hn-halfnote-reconcile", "--namespace", space)
    [pod] = until(lambda: pods_of(kube, space), "the proof has a pod")
    ended = {
        "phase": "Failed",
        "containerStatuses": [
            {
                "name": "reconcile",
                "image": "halfnote-spark",
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"terminated": {"exitCode": status}},
            }
        ],
    }
    patch = ["patch", "pod", pod, "--namespace", space, "--subresource=status", "--type=merge"]
    kube.kubectl(*patch, "--patch", json.dumps({"status": ended}))
    if again:
        until(lambda: len(pods_of(kube, space)) == 2, "it is tried again")
        return
    failed = until(lambda: condition(kube, space, "Failed"), "the Job has failed")
    assert failed["reason"] == "PodFailurePolicy"
    assert pods_of(kube, space) == [pod]


def pods_of(kube: Cluster, space: str) -> list[str]:
    found = kube.get("pod", "--namespace", space, "--selector", "job-name=proof")["items"]
    return [pod["metadata"]["name"] for pod in found]


def condition(kube: Cluster, space: str, kind: str) -> dict[str, Any] | None:
    conditions = kube.get("job", "proof", "--namespace", space)["status"].get("conditions", [])
    return next((one for one in conditions if one["type"] == kind), None)


def test_sparks_driver_may_make_executors_and_read_no_secrets(kube: Cluster, space: str) -> None:
    values = next(file for file in VALUES if file.stem == "kubernetes-values")
    installed(kube, space, values)
    driver = f"--as=system:serviceaccount:{space}:hn-halfnote-spark"
    may = ["create pods", "watch pods", "delete pods", "create configmaps", "deletecollection services"]
    may_not = ["get secrets", "create deployments", "create rolebindings"]
    for what in (*may, *may_not):
        verb, resource = what.split()
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {
                    "namespace": space,
                    "verb": verb,
                    "resource": resource,
                    "group": {"deployments": "apps", "rolebindings": "rbac.authorization.k8s.io"}.get(resource, ""),
                }
            },
        }
        answer = json.loads(
            kube.kubectl(
                "create", driver, "--validate=false", "--filename", "-", "--output=json", stdin=json.dumps(review)
            )
        )
        assert answer["status"]["allowed"] is (what in may), what


def test_spark_makes_executors_that_are_as_restricted_as_all_else(kube: Cluster, space: str, tmp_path: Path) -> None:
    if shutil.which("java") is None:
        absent("Spark needs Java 17: apt install openjdk-17-jre-headless", "HELM")
    values = next(file for file in VALUES if file.stem == "kubernetes-values")
    installed(kube, space, values)
    settings = kube.get("configmap", "hn-halfnote-spark", "--namespace", space)["data"]
    for name, text in settings.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "program.py").write_text(
        "from pyspark.sql import SparkSession\nSparkSession.builder.getOrCreate().range(9).count()\n"
    )
    token = kube.kubectl("create", "token", "hn-halfnote-spark", "--namespace", space).strip()
    given = {
        # What a pod of Kubernetes has, and this machine has not.
        "spark.kubernetes.authenticate.oauthToken": token,
        "spark.kubernetes.authenticate.caCertFile": f"{kube.directory}/ca.crt",
        "spark.kubernetes.executor.podTemplateFile": f"{tmp_path}/executor.yaml",
        "spark.driver.port": "0",
        "spark.driver.blockManager.port": "0",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(tmp_path),
    }
    options = [word for name, value in given.items() for word in ("--conf", f"{name}={value}")]
    proof = kube.get("cronjob", "hn-halfnote-reconcile", "--namespace", space)["spec"]["jobTemplate"]["spec"]
    for word in proof["template"]["spec"]["containers"][0]["args"]:
        if "$(POD_IP)" in word:
            options += ["--conf", word.replace("$(POD_IP)", DRIVER)]
    home = str(Path(pyspark.__file__).parent)
    submit = [f"{home}/bin/spark-submit", "--master", f"k8s://{kube.server}", "--deploy-mode", "client"]
    with (tmp_path / "log").open("wb") as log:
        driver = subprocess.Popen(
            [*submit, "--properties-file", f"{tmp_path}/spark.properties", *options, str(tmp_path / "program.py")],
            env={**os.environ, "SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            made = until(lambda: executors(kube, space, driver, tmp_path / "log"), "there are executors")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    for pod in made:
        [container] = pod["spec"]["containers"]
        assert container["image"] == "halfnote-spark:0.1.0"
        assert container["args"] == ["executor"]
        [driver_url] = [one["value"] for one in container["env"] if one["name"] == "SPARK_DRIVER_URL"]
        assert urlsplit(driver_url).hostname == DRIVER
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
        assert {"/staging", "/archive", "/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
        asked = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        assert asked == {"hn-halfnote-staging", "hn-halfnote-archive"}
        assert pod["metadata"]["labels"]["halfnote/spark"] == "true"


def executors(kube: Cluster, space: str, driver: subprocess.Popen[bytes], log: Path) -> list[dict[str, Any]]:
    """The executors' pods, once all four are there."""
    assert driver.poll() is None, log.read_text()[-3000:]
    found: list[dict[str, Any]] = kube.get("pod", "--namespace", space, "--selector", "spark-role=executor")["items"]
    return found if len(found) == 4 else []
