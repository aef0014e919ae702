"""The chart's alerts: what they ask for as the service shows it, and when they fire, as promtool plays them."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as families

from app.loops import gauges
from app.runtime.state import Runtime
from tests.helm.programs import CHART, program, rendered, run
from tests.helm.test_chart import ALERTS, queries
from tests.support.check_responder import Responder
from tests.support.relay_stepping import subscribe

RISES = [
    (alert["alert"], name, dict(re.findall(r'(\w+)="([^"]*)"', matchers)))
    for alert in ALERTS
    for name, matchers in re.findall(r"increase\((halfnote_\w+)\{SELECTOR(.*?)\}\[", alert["expr"])
]


def test_alerts_ask_what_rose() -> None:
    assert {"HalfnoteBreakerOpened", "HalfnoteLeftUndelivered", "HalfnotePolicyDecided"} <= {rise[0] for rise in RISES}


@pytest.mark.parametrize(("alert", "name", "labels"), RISES, ids=[rise[0] for rise in RISES])
async def test_what_an_alert_sees_rise_begins_at_zero(
    client: httpx.AsyncClient, runtime: Runtime, alert: str, name: str, labels: dict[str, str]
) -> None:
    async with Responder() as receiver:
        await subscribe(client, receiver, "mailer")
    await gauges.step(runtime, runtime.clock.now())
    [family] = [one for one in families(runtime.metrics.exposition().decode()) if f"{one.name}_total" == name]
    found = [sample for sample in family.samples if labels.items() <= sample.labels.items()]
    assert found, alert
    assert {sample.value for sample in found} == {0}
    if "subscription" in runtime.metrics.registry._names_to_collectors[name]._labelnames:  # type: ignore[attr-defined]
        assert {sample.labels["subscription"] for sample in found} == {"mailer"}


PRODUCTION = CHART / "ci" / "production-values.yaml"
API = 'namespace="prod", service="hn-halfnote", pod="api-0"'
WORKER = 'namespace="prod", service="hn-halfnote-worker", pod="worker-0"'
MAILER = f'{WORKER}, subscription="mailer"'
HOUR = 60
# A service that is well, for longer than any test; a value each minute.
WELL = {
    f"up{{{API}}}": "1x3000",
    f"up{{{WORKER}}}": "1x3000",
    f"halfnote_ready{{{API}}}": "1x3000",
    f"halfnote_ready{{{WORKER}}}": "1x3000",
    f'halfnote_loop_age_seconds{{{WORKER}, loop="gauges"}}': "3x3000",
    f'halfnote_loop_late{{{WORKER}, loop="gauges"}}': "0x3000",
    f'halfnote_requests_total{{{API}, route="/half", status="201"}}': "0+6000x3000",
    f"halfnote_reconciliation_age_seconds{{{WORKER}}}": "3600x3000",
    f"halfnote_relay_lag_seconds{{{MAILER}}}": "0x3000",
    f"halfnote_oldest_retry_seconds{{{MAILER}}}": "0x3000",
    f"halfnote_dead_letters{{{MAILER}}}": "0x3000",
    f'halfnote_breakers_total{{{MAILER}, what="opened"}}': "0x3000",
    f"halfnote_left_undelivered_total{{{MAILER}}}": "0x3000",
}
# Series of a process that Prometheus reaches no more.
GONE = "1x9 stale"


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rules as the chart gives them to the Prometheus operator, as a file of Prometheus's own."""
    program("promtool")
    return rules_of(rendered(PRODUCTION), tmp_path_factory.mktemp("alerts") / "rules.yaml")


def rules_of(objects: str, file: Path) -> Path:
    """Write the groups of the PrometheusRule among some objects to a file."""
    [rule] = [one for one in yaml.safe_load_all(objects) if one and one["kind"] == "PrometheusRule"]
    file.write_text(yaml.safe_dump({"groups": rule["spec"]["groups"]}))
    return file


def played(rules: Path, series: dict[str, str], expected: list[tuple[float, set[str]]]) -> None:
    """Play series, a value each minute, to the rules: at these minutes exactly these alerts fire."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{round(minute * 60)}s",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": times} for name, times in count(names)],
            }
            for minute, names in expected
        ],
    }
    file = rules.parent / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [test]}))
    done = run([program("promtool"), "test", "rules", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr


def count(names: set[str]) -> list[tuple[str, int]]:
    """How often each alert fires; `name*2`: twice."""
    return [(name.partition("*")[0], int(name.partition("*")[2] or 1)) for name in sorted(names)]


def test_prometheus_takes_every_rule(rules: Path) -> None:
    done = run([program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(rules)])
    assert done.returncode == 0, done.stdout + done.stderr
    # Production leaves one out.
    assert f"SUCCESS: {len(ALERTS) - 1} rules found" in done.stdout


def test_prometheus_takes_every_query(tmp_path: Path) -> None:
    names = {alert["alert"] for alert in ALERTS}
    asked = [query for where, query in queries() if where not in names and not query.startswith("label_values(")]
    # As Grafana, and Helm for KEDA, would write them.
    asked = [re.sub(r"\{\{.*?\}\}", "x", query.replace("$__rate_interval", "5m")) for query in asked]
    records = [{"record": f"asked:{n}", "expr": query} for n, query in enumerate(asked)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "asked", "rules": records}]}))
    done = run([program("promtool"), "check", "rules", "--lint=none", str(tmp_path / "rules.yaml")])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(asked)} rules found" in done.stdout


CASES: dict[str, tuple[dict[str, Any], list[tuple[float, set[str]]]]] = {
    "all is well": ({}, [(minute, set()) for minute in (1, 30, 300, 49 * HOUR)]),
    "a certificate expires in fewer than five days": (
        {f'halfnote_tls_certificate_expires_timestamp_seconds{{{API}, file="/tls.crt"}}': f"{5 * 86_400 + 3600}x300"},
        [(59, set()), (75, {"HalfnoteCertificateExpires"})],
    ),
    "a new certificate cannot be used": (
        {f'halfnote_tls_certificate_not_reloaded{{{API}, file="/tls.crt"}}': "0x9 1x60"},
        [(14, set()), (17, {"HalfnoteCertificateNotReloaded"})],
    ),
    "no process of the API answers, a worker does": (
        {f"up{{{API}}}": "1x9 0x60", f"halfnote_ready{{{API}}}": GONE},
        [(11, set()), (13, {"HalfnoteApiDown"}), (60, {"HalfnoteApiDown"})],
    ),
    "the API has no pods": (
        {f"up{{{API}}}": "1x9 stale", f"halfnote_ready{{{API}}}": GONE},
        [(11, set()), (13, {"HalfnoteApiDown"})],
    ),
    "no worker answers": (
        {
            f"up{{{WORKER}}}": "1x9 0x60",
            f"halfnote_ready{{{WORKER}}}": GONE,
            f'halfnote_loop_age_seconds{{{WORKER}, loop="gauges"}}': GONE,
            f'halfnote_loop_late{{{WORKER}, loop="gauges"}}': "0x9 stale",
        },
        [(14, set()), (16, {"HalfnoteNoWorker"})],
    ),
    "nothing answers": (
        {
            f"up{{{API}}}": "1x9 0x60",
            f"up{{{WORKER}}}": "1x9 0x60",
            f"halfnote_ready{{{API}}}": GONE,
            f"halfnote_ready{{{WORKER}}}": GONE,
            f'halfnote_loop_age_seconds{{{WORKER}, loop="gauges"}}': GONE,
            f'halfnote_loop_late{{{WORKER}, loop="gauges"}}': "0x9 stale",
        },
        [(13, {"HalfnoteDown", "HalfnoteApiDown"}), (16, {"HalfnoteDown", "HalfnoteApiDown", "HalfnoteNoWorker"})],
    ),
    "a loop hangs": (
        {
            f'halfnote_loop_age_seconds{{{WORKER}, loop="relay"}}': "1x9 60+60x30 1x60",
            f'halfnote_loop_late{{{WORKER}, loop="relay"}}': "0x10 1x29 0x60",
        },
        [(12, set()), (14, {"HalfnoteLoopLate"}), (39, {"HalfnoteLoopLate"}), (41, set())],
    ),
    # HALFNOTE_TLS_RELOAD_S is an hour.
    "the certificate is read each hour": (
        {
            f'halfnote_loop_age_seconds{{{API}, loop="certificate"}}': "0+60x59 0+60x59",
            f'halfnote_loop_late{{{API}, loop="certificate"}}': "0x120",
        },
        [(minute, set()) for minute in (5, 30, 59, 110)],
    ),
    # Kubernetes sends nothing to pods that are not ready: no request is refused, and no ratio of requests is a number.
    "the database is away": (
        {
            f"halfnote_ready{{{API}}}": "1x9 0x20 1x60",
            f"halfnote_ready{{{WORKER}}}": "1x9 0x20 1x60",
            f'halfnote_requests_total{{{API}, route="/half", status="201"}}': "0+6000x9 54000x20 60000+6000x60",
            f'halfnote_requests_total{{{API}, route="/half", status="503"}}': "0x9 40x80",
        },
        [(11, set()), (13, {"HalfnoteNotReady*2"}), (29, {"HalfnoteNotReady*2"}), (33, set())],
    ),
    "one of two pods is not ready": (
        {'halfnote_ready{namespace="prod", service="hn-halfnote", pod="api-1"}': "0x60"},
        [(60, set())],
    ),
    "one of twenty halves is refused": (
        {
            f'halfnote_requests_total{{{API}, route="/half", status="201"}}': "0+5700x60",
            f'halfnote_requests_total{{{API}, route="/half", status="503"}}': "0+300x60",
        },
        [(4, set()), (10, {"HalfnoteRefusing"})],
    ),
    "one of fifty requests ends in an error": (
        {
            f'halfnote_requests_total{{{API}, route="/half", status="201"}}': "0+5880x60",
            f'halfnote_requests_total{{{API}, route="/half", status="500"}}': "0+120x60",
        },
        [(4, set()), (10, {"HalfnoteErrors"})],
    ),
    "the only request of each minute ends in an error, beside probes": (
        {
            f'halfnote_requests_total{{{API}, route="/readyz", status="200"}}': "0+600x60",
            f'halfnote_requests_total{{{API}, route="/metrics", status="200"}}': "0+60x60",
            f'halfnote_requests_total{{{API}, route="/half", status="201"}}': "0x60",
            f'halfnote_requests_total{{{API}, route="/half", status="500"}}': "0+1x60",
        },
        [(4, set()), (10, {"HalfnoteErrors"})],
    ),
    # Such as those of the Python client under load.
    "one of twenty halves in requests with many is refused": (
        {
            f'halfnote_requests_total{{{API}, route="/halves", status="200"}}': "0+300x60",
            f'halfnote_transaction_outcomes_total{{{API}, route="/halves", status="201"}}': "0+5700x60",
            f'halfnote_transaction_outcomes_total{{{API}, route="/halves", status="503"}}': "0+300x60",
        },
        [(4, set()), (10, {"HalfnoteRefusing"})],
    ),
    "requests with many ends are refused whole": (
        {
            f'halfnote_requests_total{{{API}, route="/ends", status="200"}}': "0+5700x60",
            f'halfnote_requests_total{{{API}, route="/ends", status="503"}}': "0+300x60",
            f'halfnote_transaction_outcomes_total{{{API}, route="/ends", status="200"}}': "0+570000x60",
        },
        [(4, set()), (10, {"HalfnoteRefusing"})],
    ),
    "one of fifty ends in requests with many ends in an error": (
        {
            f'halfnote_transaction_outcomes_total{{{API}, route="/ends", status="200"}}': "0+5880x60",
            f'halfnote_transaction_outcomes_total{{{API}, route="/ends", status="500"}}': "0+120x60",
        },
        [(4, set()), (10, {"HalfnoteErrors"})],
    ),
    "one of two hundred ends in requests with many is refused": (
        {
            f'halfnote_transaction_outcomes_total{{{API}, route="/ends", status="200"}}': "0+5970x60",
            f'halfnote_transaction_outcomes_total{{{API}, route="/ends", status="503"}}': "0+30x60",
        },
        [(minute, set()) for minute in (4, 10, 30)],
    ),
    "requests with many halves are slow": (
        {
            f'halfnote_request_seconds_bucket{{{API}, route="/halves", le="{bound}"}}': f"0+{count}x60"
            for bound, count in (("0.5", 95), ("2.5", 100), ("+Inf", 100))
        },
        [(9, set()), (16, {"HalfnoteSlow"})],
    ),
    "a late subscription is deleted": (
        {f"halfnote_relay_lag_seconds{{{MAILER}}}": "0+60x59 stale"},
        [(25, set()), (27, {"HalfnoteDeliveryLate"}), (59, {"HalfnoteDeliveryLate"}), (60, set()), (300, set())],
    ),
    "another worker takes a late subscription over and is quick": (
        {
            f"halfnote_relay_lag_seconds{{{MAILER}}}": "1200x29 stale",
            'halfnote_relay_lag_seconds{namespace="prod", service="hn-halfnote-worker", pod="worker-1", '
            'subscription="mailer"}': "_x29 0x60",
        },
        [(29, {"HalfnoteDeliveryLate"}), (31, set())],
    ),
    "a breaker opens for the first time": (
        {f'halfnote_breakers_total{{{MAILER}, what="opened"}}': "0x29 1x100"},
        [(29, set()), (31, {"HalfnoteBreakerOpened"}), (58, {"HalfnoteBreakerOpened"}), (61, set())],
    ),
    "a day is removed undelivered": (
        {
            f"halfnote_left_undelivered_total{{{MAILER}}}": "0x29 2x100",
            f"halfnote_dead_letters{{{MAILER}}}": "0x29 2x99",
        },
        [(31, {"HalfnoteLeftUndelivered"}), (40, {"HalfnoteLeftUndelivered", "HalfnoteDeadLetters"})],
    ),
    "one of twenty messages is received after minutes": (
        {
            f'halfnote_commit_to_received_seconds_bucket{{{MAILER}, le="{bound}"}}': f"0+{count}x60"
            for bound, count in (("0.1", 95), ("60.0", 95), ("300.0", 100), ("+Inf", 100))
        },
        [(15, set()), (20, {"HalfnoteReceivedLate"})],
    ),
    "one of two hundred messages is received after minutes": (
        {
            f'halfnote_commit_to_received_seconds_bucket{{{MAILER}, le="{bound}"}}': f"0+{count}x60"
            for bound, count in (("0.1", 199), ("60.0", 199), ("300.0", 200), ("+Inf", 200))
        },
        [(minute, set()) for minute in (15, 20, 40)],
    ),
    # Its next try may be hours off; the lag stays 0.
    "a message is tried in vain": (
        {f"halfnote_oldest_retry_seconds{{{MAILER}}}": "0+60x119 0x60"},
        [(65, set()), (72, {"HalfnoteRetryFailing"}), (119, {"HalfnoteRetryFailing"}), (121, set())],
    ),
    # +Inf until a run ends, as on every new installation.
    "the first proof comes in the first night": (
        {f"halfnote_reconciliation_age_seconds{{{WORKER}}}": "Inf " * 8 * HOUR + "0+60x1500"},
        [(minute, set()) for minute in (HOUR, 3 * HOUR, 8 * HOUR, 30 * HOUR)],
    ),
    "no proof ever ends": (
        {f"halfnote_reconciliation_age_seconds{{{WORKER}}}": "Inf " * 32 * HOUR + "0+60x60"},
        [(29 * HOUR, set()), (30 * HOUR + 1, {"HalfnoteProofNever"}), (32 * HOUR + 1, set())],
    ),
    "a night is missed": (
        {f"halfnote_reconciliation_age_seconds{{{WORKER}}}": "0+60x2000 0+60x60"},
        [(30 * HOUR, set()), (31 * HOUR + 2, {"HalfnoteProofMissing"}), (2002, set())],
    ),
    "a retry is brought over in time": (
        {f"halfnote_oldest_retry_seconds{{{MAILER}}}": "0+60x59 0x60"},
        [(minute, set()) for minute in (59, 61, 90)],
    ),
}


@pytest.mark.parametrize(("series", "expected"), CASES.values(), ids=CASES)
def test_alerts_fire_when_they_should(
    rules: Path, series: dict[str, str], expected: list[tuple[float, set[str]]]
) -> None:
    played(rules, {**WELL, **series}, expected)


# Production leaves this alert out.
UNROUTED: dict[str, tuple[dict[str, Any], list[tuple[float, set[str]]]]] = {
    "messages match no subscription": (
        {f"halfnote_unrouted_messages{{{WORKER}}}": "0x29 3x300"},
        [(29, set()), (36, {"HalfnoteUnrouted"}), (88, {"HalfnoteUnrouted"}), (95, set()), (300, set())],
    ),
    "a new installation's first messages match no subscription": (
        {f"halfnote_unrouted_messages{{{WORKER}}}": "_x9 2x100"},
        [(9, set()), (16, {"HalfnoteUnrouted"})],
    ),
    # Nothing is shown until a worker's first turn; then no worker runs for a while.
    "workers restart after messages matched no subscription": (
        {f"halfnote_unrouted_messages{{{WORKER}}}": "5x99 _x1 5x99 _x30 5x300"},
        [(minute, set()) for minute in (101, 108, 166, 235, 300, 360)],
    ),
}


@pytest.mark.parametrize(("series", "expected"), UNROUTED.values(), ids=UNROUTED)
def test_the_alert_on_unrouted_messages_fires_for_new_ones(
    tmp_path: Path, series: dict[str, str], expected: list[tuple[float, set[str]]]
) -> None:
    program("promtool")
    made = rendered(PRODUCTION, "--set-json", "prometheusRule.disabled=[]")
    played(rules_of(made, tmp_path / "rules.yaml"), {**WELL, **series}, expected)
