"""The Prometheus metrics of one process, in six groups and those of the process itself."""

import asyncio
import os
from collections.abc import Iterator
from math import isnan
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest, multiprocess
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.observability.metric_families import Families
from app.observability.metric_groups import (
    CheckbackMetrics,
    HttpMetrics,
    ProcessMetrics,
    ProofMetrics,
    RelayMetrics,
    RetentionMetrics,
)
from app.observability.tallies import Tallies
from app.observability.traffic_metrics import TrafficMetrics


class Metrics:
    """All groups over one registry. The loop that measures a gauge of the database sets it.

    `values_max`: most values of each label that callers choose, see app.observability.label_limits.
    """

    def __init__(self, values_max: int = 200) -> None:
        # The time when a series was made is of no use, and doubles the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        families = Families(self.registry)
        self.tallies = Tallies()
        self.http = HttpMetrics(families, self.tallies)
        self.checkback = CheckbackMetrics(families)
        self.traffic = TrafficMetrics(families, self.tallies, values_max)
        self.relay = RelayMetrics(families, values_max)
        self.retention = RetentionMetrics(families, self.relay.subscriptions)
        self.proof = ProofMetrics(families)
        self.process = ProcessMetrics(families)

    def exposition(self) -> bytes:
        """Return the text that `/metrics` answers, over all processes of one `halfnote serve`."""
        self.tallies.publish()
        return self._collected()

    async def exposition_beside(self) -> bytes:
        """Return the same from a thread: with many series it takes tenths of a second, and the event loop goes on."""
        # Here, because the loop counts. What is left to read has locks, or is in files that other processes write too.
        self.tallies.publish()
        return await asyncio.to_thread(self._collected)

    def _collected(self) -> bytes:
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        directory = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        _remove_dead(directory)
        combined = CollectorRegistry()
        combined.register(_AllProcesses(directory))
        return generate_latest(combined)


class _AllProcesses(Collector):
    """The families of all processes, without the series that were withdrawn."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        # Not `glob`, which finds nothing in a directory that is gone.
        files = [str(file) for file in self._directory.iterdir() if file.suffix == ".db" and _has_begun(file)]
        for family in multiprocess.MultiProcessCollector.merge(files):  # type: ignore[no-untyped-call]
            family.samples = [sample for sample in family.samples if not isnan(sample.value)]
            yield family


def _has_begun(file: Path) -> bool:
    """Return whether a file can be read: a process makes an empty one, then gives it its size, then writes."""
    try:
        return file.stat().st_size > 0
    except FileNotFoundError:
        # Another process removed it as that of a dead one.
        return False


def _remove_dead(directory: Path) -> None:
    """Remove the gauges of processes that have ended, however they ended, from the other processes' answers."""
    for file in directory.glob("gauge_live*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not psutil.pid_exists(pid):
            # Two processes may be asked at once. `mark_process_dead` of the library raises then.
            file.unlink(missing_ok=True)
