"""The chart by itself, without Helm: its values and their schema, its alerts, runbooks and dashboard."""

import ipaddress
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from app.config import Settings
from app.database.connection import KEYED_CONNECTIONS
from app.egress.denied_addresses import METADATA
from app.errors import all_problems
from app.observability.metrics import Metrics
from scripts import chart_settings
from tests.helm.programs import CHART, VALUES
from tests.support.processes import ROOT

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
ALERTS: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["alerts"]
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())
RUNBOOKS = ROOT / "docs" / "runbooks"
DATABASE = {"database": {"url": "postgresql://halfnote@db/halfnote"}}


def refused(values: dict[str, Any]) -> list[str]:
    """Where the schema finds fault with values, as paths."""
    return [
        "/".join(str(part) for part in error.instance_path)
        for error in jsonschema_rs.validator_for(SCHEMA).iter_errors(values)
    ]


def merged(values: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Values as Helm lays them over others."""
    return {
        **values,
        **{
            name: merged(values[name], value)
            if isinstance(value, dict) and isinstance(values.get(name), dict)
            else value
            for name, value in over.items()
        },
    }


def exposed() -> dict[str, set[str]]:
    """The names that `/metrics` can show, each with the labels that it has."""
    names: dict[str, set[str]] = {}
    for family in Metrics().registry._names_to_collectors.items():
        name, collector = family
        names[name] = set(collector._labelnames)  # type: ignore[attr-defined]
    return names


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of the chart, with where it is."""
    for alert in ALERTS:
        yield alert["alert"], alert["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    scaling = (CHART / "templates" / "scaling.yaml").read_text()
    for query in re.findall(r"^ +query: (.*)$", scaling, re.MULTILINE):
        yield "keda", query


def test_the_schema_takes_options_as_this_version_does() -> None:
    written, made = SCHEMA["properties"]["settings"], chart_settings.settings_schema()
    assert written["additionalProperties"] is False
    assert written["properties"].keys() <= made["properties"].keys(), "run `make docs`"
    assert len(written["properties"]) > 20
    for name, option in written["properties"].items():
        assert without_words(option) == without_words(made["properties"][name]), f"{name}: run `make docs`"
    secret = {name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)}
    assert made["properties"].keys() == Settings.model_fields.keys() - chart_settings.OWNED - secret
    # The file keeps characters such as `…`, so that it stays readable.
    assert "\\u" not in chart_settings.schema()


def without_words(option: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in option.items() if key != "description"}


@pytest.mark.parametrize("file", [None, *VALUES], ids=lambda file: file.stem if file else "defaults")
def test_good_values_are_taken(file: Path | None) -> None:
    over = yaml.safe_load(file.read_text()) if file else DATABASE
    assert refused(merged(DEFAULTS, over)) == []


def leaves(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of the schema's objects that have properties of their own."""
    yield path
    for name, inner in schema.get("properties", {}).items():
        if inner.get("additionalProperties") is False:
            yield from leaves(inner, (*path, name))


def at(path: tuple[str, ...], value: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


@pytest.mark.parametrize("path", list(leaves(SCHEMA)), ids="/".join)
def test_unknown_values_are_refused_everywhere(path: tuple[str, ...]) -> None:
    assert refused(merged(DEFAULTS, at(path, {"replicaz": 1}))) == ["/".join(path)]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("api/replicas", 0),
        ("api/replicas", "two"),
        ("api/processes", 65),
        ("api/resources/requests/memory", "lots"),
        ("api/autoscaling/targetCPUUtilizationPercentage", 101),
        ("api/podDisruptionBudget/maxUnavailable", 0),
        ("worker/keda/prometheusAddress", "prometheus:9090"),
        ("database/url", "mysql://db/halfnote"),
        ("database/existingSecret", "Not A Name"),
        ("image/tag", "a b"),
        ("image/digest", "sha256:abc"),
        ("image/pullPolicy", "Sometimes"),
        ("shutdown/drainSeconds", 0),
        ("shutdown/preStopSeconds", -1),
        ("service/type", "ExternalName"),
        ("service/port", 70000),
        ("reconciliation/engine", "yarn"),
        ("reconciliation/schedule", "every night"),
        ("reconciliation/backoffLimit", 11),
        ("reconciliation/staging/size", "much"),
        ("reconciliation/cores", 0),
        ("reconciliation/executor/memory", "3Gi"),
        ("reconciliation/certificate/existingSecret", "Not A Name"),
        ("reconciliation/certificate/existingSecretKey", ""),
        ("reconciliation/installations/name", "a b"),
        ("reconciliation/installations/others", [{"name": "us"}]),
        ("reconciliation/installations/others", [{"name": "us", "existingSecret": "Not A Name"}]),
        ("reconciliation/installations/others", [{"name": "us", "existingSecret": "us", "baseUrl": "us.example"}]),
        ("archive/url", "/a/path"),
        ("archive/keepSeconds", 1),
        ("archive/keepSeconds", 10**12),
        ("archive/volume/accessMode", "ReadOnlyMany"),
        ("settings/batch_max", 501),
        ("settings/retention_s", "a week"),
        ("settings/database_url", "postgresql://x"),
        ("settings/auth", "off"),
        ("settings/host", "127.0.0.1"),
        ("host", "127.0.0.1"),
        ("host", ""),
        ("extraEnv", [{"nam": "A"}]),
        ("extraContainers", [{"name": "proxy"}]),
        ("extraObjects", [{"kind": "ConfigMap"}]),
        ("hostAliases", [{"ip": "10.1.2.3"}]),
        ("keys/generate", "yes"),
        ("reconciliation/executor/ephemeralStorage", "much"),
        ("serviceMonitor/relabelings", ["drop"]),
        ("worker/topologySpreadConstraints", [{"topologyKey": "rack"}]),
        ("commonLabels", {"app.kubernetes.io/instance": "other"}),
        ("api/podLabels", {"app.kubernetes.io/component": "web"}),
        ("worker/podLabels", {"app.kubernetes.io/name": "shop"}),
        ("worker/podLabels", {"halfnote/spark": "true"}),
        ("networkPolicy/monitoring", []),
        ("networkPolicy/dns/ports", []),
        ("networkPolicy/dns/ports", [0]),
        ("rocketmq/replicas", 0),
        ("rocketmq/credentials/existingSecret", "Not A Name"),
        ("rocketmq/remoting/addresses", ["mq1.example"]),
        ("rocketmq/maxBodyBytes", 0),
        ("rocketmq/requestTimeoutSeconds", 0),
        ("rocketmq/maxConnections", 0),
        ("rocketmq/maxTopics", 0),
        ("rocketmq/maxSettingsBytes", 0.5),
        ("rocketmq/maxSettingsPerMinute", 0),
        ("rocketmq/maxBufferedBytes", 1000),
        ("rocketmq/service/remotingPort", 70000),
        ("rocketmq/podLabels", {"app.kubernetes.io/component": "web"}),
        ("prometheusRule/disabled", ["Other"]),
    ],
)
def test_wrong_values_are_refused(path: str, value: Any) -> None:
    *before, name = path.split("/")
    found = refused(merged(DEFAULTS, at(tuple(before), {name: value})))
    assert found
    assert all(where == path or where.startswith(f"{path}/") or where == "/".join(before) for where in found)


def test_no_label_of_ones_own_is_one_that_pods_are_found_by() -> None:
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir() if file.is_file())
    ours = set(re.findall(r"^ *((?:app\.kubernetes\.io|halfnote)/[\w-]+|helm\.sh/chart):", templates, re.MULTILINE))
    assert "app.kubernetes.io/component" in ours
    for path in (("commonLabels",), *((of, "podLabels") for of in ("api", "worker", "rocketmq"))):
        for name in ours:
            assert refused(merged(DEFAULTS | DATABASE, at(path, {name: "x"}))) == ["/".join(path)], name
        assert refused(merged(DEFAULTS | DATABASE, at(path, {"team": "x", "app.kubernetes.io/created-by": "y"}))) == []


def test_the_pages_say_how_many_connections_a_process_takes() -> None:
    kept = sum(
        len(
            re.findall(
                r"await self\._database\.dedicated\(|= GroupCommitLane\(\s*connect", (ROOT / "app" / name).read_text()
            )
        )
        for name in ("coordinator/commit_lanes.py", "database/notifier.py")
    )
    kept += KEYED_CONNECTIONS
    pool = Settings.model_fields["pool_size"].default
    # Upkeep's own; one process at a time does upkeep, and each worker looks whether that is its turn.
    upkeep = (ROOT / "app" / "retention" / "loop.py").read_text().count("database.dedicated(")
    worker = pool + kept + upkeep
    # It listens, and keeps a second connection for the loops, only once consumers wait there.
    api, claiming = pool + kept - 2, pool + kept + Settings.model_fields["claim_connections"].default
    said = (
        f"A worker holds up to {worker} database connections, an API process {api}, and where consumers claim messages"
    )
    assert f"{said} {claiming}\n" in (ROOT / "docs" / "kubernetes.md").read_text()
    sizing = (ROOT / "docs" / "operations" / "sizing.md").read_text()
    assert f"so {pool + kept}." in sizing
    assert f"| worker | 1 | {worker} |" in sizing
    assert f"| API process | 1 | {api}, with claims {claiming} |" in sizing
    assert f"| 2 | {worker + api}, with claims {worker + claiming} |" in sizing
    poolers = " ".join((ROOT / "docs" / "operations" / "poolers.md").read_text().split())
    assert f"{api} for an API process, {claiming} where consumers claim messages, and {worker} for a worker" in poolers
    example = (ROOT / "helm" / "examples" / "cloudnativepg.yaml").read_text()
    assert (
        f"up to {worker} connections, an API process {api}, and where consumers claim messages {claiming}." in example
    )


def test_helm_waits_longer_than_the_hooks_may_take() -> None:
    hooks = max(DEFAULTS[of]["activeDeadlineSeconds"] for of in ("migration", "apply"))
    commands = [
        line
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for line in page.read_text().replace("\\\n", " ").splitlines()
        if re.match(r"helm (install|upgrade) ", line)
    ]
    assert len(commands) >= 2
    for command in commands:
        given = re.search(r"--timeout (\d+)m", command)
        assert given, command
        assert int(given[1]) * 60 > hooks, command


def test_no_pod_reaches_what_hands_out_credentials_of_its_machine() -> None:
    blocks = [peer["ipBlock"] for peer in DEFAULTS["networkPolicy"]["destinations"] if "ipBlock" in peer]
    for address, whose in METADATA:
        own = ipaddress.ip_address(address)
        reached = [
            block
            for block in blocks
            if own in ipaddress.ip_network(block["cidr"])
            and not any(own in ipaddress.ip_network(network) for network in block["except"])
        ]
        assert reached == [], (address, whose)


def test_what_calls_the_api_from_the_chart_reaches_it_whatever_the_destinations_are() -> None:
    """Without a policy of its own such a pod has the service's, whose destinations may be few."""
    service, api = (CHART / "templates" / "networkpolicy.yaml").read_text().split("\n---\n")[:2]
    callers = set(re.findall(r"component: (\w+)$", api.split("  ingress:")[1], re.MULTILINE))
    assert callers == {"apply", "rocketmq", "test"}
    [excluded] = re.findall(r"operator: NotIn\n +values: \[(.*)\]", service)
    assert callers <= set(excluded.split(", "))
    texts = [file.read_text() for file in sorted((CHART / "templates").rglob("*.yaml"))]
    policies = [one for text in texts for one in text.split("\n---\n") if "kind: NetworkPolicy" in one]
    for caller in callers:
        [own] = [
            one for one in policies if re.search(rf"matchLabels:\n.*\n +\S+/component: {caller}\n +policyTypes", one)
        ]
        to = own.split("\n  egress:")[1]
        assert "halfnote.dnsEgress" in to
        assert re.search(r"port: http\}\n +to:\n +- podSelector:\n +matchLabels:\n.*\n +\S+component: api\b", to)


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    names = [alert["alert"] for alert in ALERTS]
    assert len(names) == len(set(names))
    assert {page.stem for page in RUNBOOKS.glob("*.md")} == {*names, "README"}
    index = (RUNBOOKS / "README.md").read_text()
    for name in names:
        page = (RUNBOOKS / f"{name}.md").read_text()
        assert page.startswith(f"# {name}: ")
        assert "\n## What to do\n\n1. " in page
        assert f"[{name}]({name}.md)" in index


def test_the_runbook_of_refusals_has_every_problem_that_the_alert_counts() -> None:
    # Secrets are sealed only when a group, a subscription or a key is written.
    counted = {one.slug for one in all_problems() if one.status == 503} - {"secrets-unreadable"}
    page = (RUNBOOKS / "HalfnoteRefusing.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == counted


def test_every_alert_says_how_bad_it_is_and_what_is_the_matter() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), alert
        assert alert["annotations"]["summary"].endswith("."), alert
        assert alert.keys() <= {"alert", "needs", "expr", "for", "labels", "annotations"}, alert
        assert alert.get("needs", "proof") == "proof", alert


@pytest.mark.parametrize(("where", "query"), list(queries()), ids=lambda text: text[:40])
def test_every_metric_that_is_asked_for_exists_with_its_labels(where: str, query: str) -> None:
    known = exposed()
    # What Prometheus adds.
    given = {"namespace", "service", "pod", "le"}
    asked = re.findall(r"\b(halfnote_\w+)(?:\{([^}]*)\})?", query)
    assert asked or query.startswith("absent(up{"), where
    for name, matchers in asked:
        assert name in known, (where, name)
        labels = set(re.findall(r"(\w+)(?:=~|!=|!~|=)", matchers.replace("SELECTOR", "").replace("ONLY_API", "")))
        assert labels <= known[name] | given, (where, name, labels)
    grouped = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", query) for label in group.split(",")}
    assert grouped <= set().union(*(known[name] for name, _ in asked)) | given, (where, grouped)
    if where in {alert["alert"] for alert in ALERTS}:
        assert len(re.findall("SELECTOR|ONLY_API", query)) == len(asked) + query.startswith("absent(up{") > 0


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(query for where, query in queries())
    families = {re.sub(r"_total$", "", name) for name, _ in ((f.name, f) for f in Metrics().registry.collect())}
    assert {name for name in families if name not in shown} == set()


def test_alerts_of_the_proof_need_it() -> None:
    for alert in ALERTS:
        assert ("needs" in alert) == ("halfnote_reconciliation_" in alert["expr"]), alert


def test_what_an_alert_tells_is_in_its_labels() -> None:
    known = exposed()
    for alert in ALERTS:
        used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
        grouped = {
            label.strip() for group in re.findall(r"\bby \(([^)]*)\)", alert["expr"]) for label in group.split(",")
        }
        assert used <= grouped, alert
        assert known
