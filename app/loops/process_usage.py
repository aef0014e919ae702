"""Measures what one process uses: CPU, memory, file descriptors, pool connections, requests in flight."""

import platform
from datetime import datetime
from importlib.metadata import version

import psutil

from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

EVERY_S = 5.0


class ProcessUsage:
    """The CPU seconds of this process that were counted already."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._counted_s = 0.0
        # To look it up reads the package's metadata from its files.
        self._version = version("halfnote-server")

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Set the gauges, and count the CPU time since the last step."""
        metrics = runtime.metrics.process
        times = self._process.cpu_times()
        used_s = times.user + times.system
        metrics.cpu_s.inc(used_s - self._counted_s)
        self._counted_s = used_s
        metrics.memory_bytes.set(self._process.memory_info().rss)
        if resource is not None:
            metrics.open_files.set(self._process.num_fds())
            metrics.open_files_max.set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        metrics.pool_in_use.set(runtime.database.connections_in_use)
        metrics.pool_size.set(runtime.settings.pool_size)
        metrics.build.labels(self._version, platform.python_version()).set(1)
        runtime.show_loop_ages()
        runtime.metrics.http.in_flight.set(runtime.load_limits.in_flight)
        runtime.metrics.http.bodies_held.set(runtime.load_limits.held_bytes)
        return StepResult(done=1)
