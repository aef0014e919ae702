"""Makes the Prometheus families of one registry, under the prefix `halfnote_`."""

import os
from bisect import bisect_left
from collections.abc import Iterable
from math import nan
from typing import Generic, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from app.observability.label_limits import LimitedLabel

# Bucket bounds: seconds, and requests in one flush.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500)

# From a commit to its receiver's answer: an attempt, its retries after minutes, a destination that was down for a day.
DELIVERY_SECONDS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(300.0, 1800.0, 7200.0, 21600.0, 86400.0),
)

# How one gauge is combined over the live processes of one service.
Combine = Literal["livemostrecent", "livesum", "livemax", "livemin"]


class BatchHistogram(Histogram):
    """A histogram that takes many values in one call, at a tenth of the cost of as many calls of `observe`."""

    def observe_all(self, values: Iterable[float]) -> None:
        """Observe these values."""
        counts: dict[int, int] = {}
        total = 0.0
        for value in values:
            bucket = bisect_left(self._upper_bounds, value)
            counts[bucket] = counts.get(bucket, 0) + 1
            total += value
        for bucket, count in counts.items():
            self._buckets[bucket].inc(count)
        if counts:
            self._sum.inc(total)


class MeasuredGauge(Gauge):
    """A gauge without labels that is not shown until it is set. Of the client's own, every process shows 0."""

    _was_set = False

    def _metric_init(self) -> None:
        """Make no value yet: among several processes each value in their files is shown."""

    def _child_samples(self) -> Iterable[Sample]:
        return super()._child_samples() if self._was_set else ()

    def set(self, value: float) -> None:
        """Set the value, and show it from now on."""
        if not self._was_set:
            super()._metric_init()
        super().set(value)
        self._was_set = True


Counted = TypeVar("Counted", Counter, BatchHistogram)


class LimitedFamily(Generic[Counted]):
    """A family whose first label has the values that `values` allows, which several families share.

    Its series cannot be removed: the files that processes share support no removal, and a counter must not fall.
    """

    family: Counted

    def __init__(self, family: Counted, values: LimitedLabel[str, str]) -> None:
        self.family, self._values = family, values

    def labels(self, value: str, *others: str | None) -> Counted:
        """Return the series of a value, or the one of OTHER."""
        series: Counted = self.family.labels(self._values.of(value), *others)
        return series


class NamedGauges:
    """The series of a gauge with one label, of which a loop sets all again and again.

    The client looks a series up by its labels, which costs more than to set it. A loop that shows hundreds of names
    each second, most of them unchanged, would use most of its time for that.
    """

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self._shown: dict[str, tuple[Gauge, float]] = {}
        self._shared = _are_shared()

    def set(self, name: str, value: float) -> None:
        """Set the value of a name."""
        shown = self._shown.get(name)
        if shown is None:
            series = self.gauge.labels(name)
        elif shown[1] == value and not self._shared:
            return
        else:
            series = shown[0]
        # Among several processes an unchanged one too: another process may have withdrawn it since.
        series.set(value)
        self._shown[name] = series, value

    def withdraw(self, name: str) -> None:
        """Remove the series of a name from what `/metrics` answers."""
        self._shown.pop(name, None)
        withdraw(self.gauge, name)


class Families:
    """Makes families in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Return a new counter; its exposed name ends with `_total`."""
        return Counter(f"halfnote_{name}", text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """Return a new histogram with these bucket bounds."""
        return Histogram(f"halfnote_{name}", text, labels, buckets=buckets, registry=self._registry)

    def batch_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> BatchHistogram:
        """Return a new histogram that takes many values in one call."""
        return BatchHistogram(f"halfnote_{name}", text, labels, buckets=buckets, registry=self._registry)

    def named_gauges(self, name: str, text: str, label: str) -> NamedGauges:
        """Return a new gauge with one label, for a loop that sets all of its series again and again."""
        return NamedGauges(self.gauge(name, text, label))

    def gauge(self, name: str, text: str, *labels: str, combine: Combine = "livemostrecent") -> Gauge:
        """Return a new gauge."""
        return Gauge(f"halfnote_{name}", text, labels, registry=self._registry, multiprocess_mode=combine)

    def measured(self, name: str, text: str, combine: Combine = "livemostrecent") -> MeasuredGauge:
        """Return a new gauge that only the processes which measure it show, from their first measure on."""
        return MeasuredGauge(f"halfnote_{name}", text, registry=self._registry, multiprocess_mode=combine)


def withdraw(gauge: Gauge, *labels: str) -> None:
    """Remove one series of a gauge from what `/metrics` answers."""
    if _are_shared():
        # The files that processes share support no removal. `Metrics.exposition` leaves out NaN.
        gauge.labels(*labels).set(nan)
    else:
        gauge.remove(*labels)


def _are_shared() -> bool:
    """Return whether several processes share their series in files."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ
