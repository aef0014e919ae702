"""What a process did, read from its own counters."""

from collections.abc import Iterable

from prometheus_client import Counter

from app.observability.metrics import Metrics
from app.verdicts import DeliveryState, Verdict


def totals(metrics: Metrics) -> dict[str, int]:
    """Return the counts of this process since its counters began, by the names of app.store.admin.minutes.Activity."""
    metrics.tallies.publish()
    verdicts = list(_values(metrics.http.verdicts))
    attempts = list(_values(metrics.relay.deliveries.family))
    return {
        "halves": sum(value for _, value in _values(metrics.http.halves)),
        "commits": sum(value for labels, value in verdicts if labels["verdict"] == Verdict.COMMIT.word),
        "rollbacks": sum(value for labels, value in verdicts if labels["verdict"] == Verdict.ROLLBACK.word),
        "deliveries": sum(value for labels, value in attempts if labels["outcome"] == DeliveryState.DELIVERED),
        "failed_attempts": sum(value for labels, value in attempts if labels["outcome"] != DeliveryState.DELIVERED),
        "checks": sum(value for _, value in _values(metrics.checkback.checks)),
    }


def _values(counter: Counter) -> Iterable[tuple[dict[str, str], int]]:
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, int(sample.value)
