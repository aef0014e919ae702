"""The chart as Helm renders it: lint, its own unit tests, and every object against Kubernetes's schemas."""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from app.admission.request_guard import RequestGuard
from app.config import Settings
from app.errors import HostNotAllowed
from app.secrets.key_file import new_key, read_keys
from spark.options import archive, reconcile
from tests.helm.programs import CHART, KUBERNETES, SCHEMAS, VALUES, program, rendered, require, run

JOBS = "/opt/halfnote/spark/jobs"
EACH = pytest.mark.parametrize("values", VALUES, ids=lambda file: file.stem.removesuffix("-values"))
# Kubernetes has no schema of these; a real API judges them by their definitions (test_cluster.py).
CUSTOM = {"HTTPRoute", "PrometheusRule", "ScaledObject", "ScheduledSparkApplication", "ServiceMonitor"}


@EACH
def test_lint_finds_nothing(values: Path) -> None:
    helm = [program("helm"), "lint", str(CHART), "--strict", "--kube-version", KUBERNETES]
    done = run([*helm, "--values", str(values)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout
    assert "ERROR" not in done.stdout


def test_the_charts_own_unit_tests_pass() -> None:
    done = run([program("helm-unittest"), "--strict", str(CHART)])
    assert done.returncode == 0, done.stdout + done.stderr


@EACH
def test_every_object_is_of_kubernetes_schema(values: Path) -> None:
    require(SCHEMAS)
    kubeconform = [program("kubeconform"), "-strict", "-kubernetes-version", KUBERNETES, "-schema-location"]
    done = run([*kubeconform, str(SCHEMAS), "-skip", ",".join(sorted(CUSTOM)), "-summary"], stdin=rendered(values))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Invalid: 0, Errors: 0" in done.stdout


def test_the_command_that_makes_the_keys_makes_a_file_that_takes_another_key(tmp_path: Path) -> None:
    helm = [program("helm"), "template", "hn", str(CHART), "--kube-version", KUBERNETES]
    refused = run([*helm, "--set", "database.existingSecret=mine"])
    [command] = re.findall(r"`(kubectl .*?)`", refused.stderr)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\nfor given; do case $given in --from-file=secrets-keys=*) cat "${given##*=}" > keys;; esac; done\n'
    )
    kubectl.chmod(0o755)
    shell = [program("bash"), "-c", f"cd {tmp_path} && PATH={tmp_path}:$PATH && {command}"]
    done = run(shell)
    assert done.returncode == 0, done.stderr
    keys = tmp_path / "keys"
    keys.write_text(f"{keys.read_text()}{new_key()}\n")
    assert len(read_keys(keys).by_id) == 2


def test_values_together_make_every_kind_of_object() -> None:
    made = {
        document["kind"]
        for values in VALUES
        for document in yaml.safe_load_all(rendered(values))
        if document is not None
    }
    assert made >= CUSTOM | {
        *("ConfigMap", "CronJob", "Deployment", "HorizontalPodAutoscaler", "Ingress", "Job", "NetworkPolicy"),
        *("PersistentVolumeClaim", "Pod", "PodDisruptionBudget", "Role", "RoleBinding", "Secret", "Service"),
        *("ServiceAccount", "StatefulSet"),
    }


@EACH
def test_no_pod_may_more_than_it_needs(values: Path) -> None:
    for document in yaml.safe_load_all(rendered(values)):
        for pod in pods(document):
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert pod["enableServiceLinks"] is False
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert container["resources"]["limits"]["memory"]
                assert container["resources"]["requests"]["cpu"]


@EACH
def test_the_security_context_of_each_container_can_be_replaced(values: Path) -> None:
    replaced = ["runAsUser=4711", "readOnlyRootFilesystem=null", "capabilities.add={NET_BIND_SERVICE}"]
    more = [
        word
        for of in ("", "postgresql.")
        for field in replaced
        for word in ("--set", f"{of}containerSecurityContext.{field}")
    ]
    contexts = [context for document in yaml.safe_load_all(rendered(values, *more)) for context in own(document)]
    assert contexts
    for context in contexts:
        assert context == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
            "runAsUser": 4711,
        }


@EACH
def test_the_nightly_programs_know_their_options(values: Path) -> None:
    parsers = {"reconcile": reconcile.parsed, "archive": archive.parser().parse_args}
    for document in yaml.safe_load_all(rendered(values)):
        if document is None or document["kind"] not in ("CronJob", "ScheduledSparkApplication"):
            continue
        program = document["metadata"]["name"].removeprefix("hn-halfnote-")
        for pod in pods(document):
            arguments = pod["containers"][0]["args"]
            start = next(i for i, word in enumerate(arguments) if word in (program, f"{JOBS}/{program}.py"))
            # Wrong ones end the program.
            parsers[program](["--database-url", "postgresql://x", *arguments[start + 1 :]])
        if document["kind"] == "ScheduledSparkApplication":
            parsers[program](["--database-url", "postgresql://x", *document["spec"]["template"].get("arguments", [])])


@EACH
def test_every_container_accepts_its_environment(values: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HALFNOTE_")]:
        monkeypatch.delenv(name)
    seen = set()
    for document in yaml.safe_load_all(rendered(values)):
        for name, variables in environments(document):
            seen.add(name)
            with monkeypatch.context() as environment:
                for variable, value in variables.items():
                    environment.setenv(variable, value)
                # Raises for a value, or a combination of values, that the program refuses.
                settings = Settings()
            assert "$(" not in repr(settings), name
    assert {"halfnote", "migrate"} <= seen
    assert ("reconcile" in seen) == (values.stem != "tryout-values")


@pytest.mark.parametrize("url", [None, "https://hn-halfnote.prod.svc:8080"])
def test_limited_host_names_do_not_refuse_what_the_chart_itself_calls(
    url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = next(file for file in VALUES if file.stem == "production-values")
    more = ["--set", f"rocketmq.url={url}"] if url else []
    documents = [one for one in yaml.safe_load_all(rendered(values, "--set", "apply.enabled=false", *more)) if one]
    deployments = {one["metadata"]["name"]: one for one in documents if one["kind"] == "Deployment"}
    gateway = deployments["hn-halfnote-rocketmq"]["spec"]["template"]["spec"]["containers"][0]["args"]
    [(_, variables)] = environments(deployments["hn-halfnote-api"])
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    guard = RequestGuard(Settings())
    called = [urlsplit(gateway[gateway.index("--url") + 1]).netloc, "127.0.0.1:8080", "localhost"]
    for host in [*called, "halfnote.example.com"]:
        guard.check({"method": "GET", "headers": [(b"host", host.encode())]})
    with pytest.raises(HostNotAllowed):
        guard.check({"method": "GET", "headers": [(b"host", b"other.example")]})


def environments(document: Any) -> list[tuple[str, dict[str, str]]]:
    """Each container's name and variables, as Kubernetes expands them; pods of the Spark operator included."""
    found = [
        (container["name"], container.get("env", []))
        for pod in pods(document)
        for container in [*pod.get("initContainers", []), *pod["containers"]]
    ]
    if document is not None and document["kind"] == "ScheduledSparkApplication":
        template = document["spec"]["template"]
        program = document["metadata"]["name"].removeprefix("hn-halfnote-")
        found += [(program, template["driver"]["env"]), ("executor", template["executor"].get("env", []))]
    return [(name, expanded(variables)) for name, variables in found]


def expanded(variables: list[dict[str, Any]]) -> dict[str, str]:
    """The values of variables. Those of Secrets and of the pod's fields are made up."""
    values: dict[str, str] = {}
    for variable in variables:
        given = variable["name"]
        if "value" in variable:
            values[given] = re.sub(r"\$\((\w+)\)", lambda of: values.get(of[1], of[0]), variable["value"])
        else:
            values[given] = "postgresql://halfnote@db/halfnote" if "DATABASE_URL" in given else f"hn_{'0' * 64}"
    return values


def own(part: Any) -> list[dict[str, Any]]:
    """The security contexts of containers, jobs, hooks and the Spark operator's pods included."""
    if isinstance(part, list):
        return [context for one in part for context in own(one)]
    if not isinstance(part, dict):
        return []
    is_pod = "containers" in part
    found = [part["securityContext"]] if "securityContext" in part and not is_pod else []
    return found + [context for one in part.values() for context in own(one)]


def pods(document: Any) -> list[dict[str, Any]]:
    """The pods that an object describes, wherever in it they are."""
    found = []
    waiting = [document]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if isinstance(part.get("containers"), list):
                found.append(part)
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    return found
