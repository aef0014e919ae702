"""The examples beside the chart: accepted by a real API with the real definitions, and by the chart itself."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.helm.cluster import Cluster
from tests.helm.programs import CHART, CRDS, rendered, require

EXAMPLES = CHART.parent / "examples"
DEFINITIONS = ("postgresql.cnpg.io_clusters", "external-secrets.io_externalsecrets", "application-crd")
MANIFESTS = sorted(file for file in EXAMPLES.glob("*.yaml") if not file.stem.endswith("-values"))
CNPG_VALUES = EXAMPLES / "cloudnativepg-values.yaml"


def manifest(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return read


def argo_values() -> dict[str, Any]:
    values: dict[str, Any] = manifest("argocd.yaml")["spec"]["source"]["helm"]["valuesObject"]
    return values


def keys_asked(text: str) -> set[tuple[str, str]]:
    """Return each Secret and key that the chart's pods read."""
    found = set()
    waiting: list[Any] = list(yaml.safe_load_all(text))
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if "secretKeyRef" in part:
                found.add((part["secretKeyRef"]["name"], part["secretKeyRef"]["key"]))
            if "secretName" in part:
                found |= {(part["secretName"], item["key"]) for item in part.get("items", [])}
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)
    return found


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_the_api_accepts_every_example_strictly(kube: Cluster, space: str, file: Path) -> None:
    # `make helm-deps` of an earlier version did not fetch these.
    require(*(CRDS / f"{name}.yaml" for name in DEFINITIONS))
    made = manifest(file.name)
    made["metadata"]["namespace"] = space
    create = ["create", "--dry-run=server", "--validate=strict", "--filename", "-"]
    assert kube.kubectl(*create, stdin=json.dumps(made)).splitlines() == [
        f"{made['kind'].lower()}.{made['apiVersion'].split('/')[0]}/{made['metadata']['name']} created (server dry run)"
    ]
    made["spec"]["misspelled"] = True
    with pytest.raises(AssertionError, match=r"unknown field \"spec.misspelled\""):
        kube.kubectl(*create, stdin=json.dumps(made))


def test_the_chart_reads_the_secrets_that_the_examples_make() -> None:
    cluster, external = manifest("cloudnativepg.yaml"), manifest("external-secrets.yaml")
    made = {(f"{cluster['metadata']['name']}-app", "uri")} | {
        (external["spec"]["target"]["name"], one["secretKey"]) for one in external["spec"]["data"]
    }
    assert keys_asked(rendered(CNPG_VALUES)) == made - {("halfnote-keys", "shop-secret")}
    [to] = yaml.safe_load(CNPG_VALUES.read_text())["networkPolicy"]["database"]["to"]
    assert to["podSelector"]["matchLabels"] == {"cnpg.io/cluster": cluster["metadata"]["name"]}


def test_argo_cd_renders_the_chart_the_same_each_time(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(argo_values()))
    first = rendered(values)
    assert rendered(values) == first
    assert keys_asked(first) == keys_asked(rendered(CNPG_VALUES)) | {("halfnote-keys", "shop-secret")}
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert jsonschema_rs.is_valid(schema, argo_values())
