"""The Prometheus metrics of a gateway. `docs/metrics.md` explains each."""

from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from app.observability.metric_families import SECONDS, Families

Transport = Literal["grpc", "remoting"]
CheckOutcome = Literal["sent", "no_producer", "not_encoded"]


class GatewayMetrics:
    """Requests of clients, what is out to them, and requests to Halfnote."""

    def __init__(self) -> None:
        # The time when a series was made is of no use, and doubles the number of series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        families = Families(self._registry)
        counter, gauge, histogram = families.counter, families.gauge, families.histogram
        self._clients = gauge("rocketmq_clients", "Clients connected to this gateway now", "protocol")
        self._requests = counter("rocketmq_requests", "Requests of clients answered", "protocol", "method", "code")
        self._request_seconds = histogram(
            "rocketmq_request_seconds",
            "Time to answer a request that waits for no message (s)",
            SECONDS,
            "protocol",
            "method",
        )
        self._refused = counter("rocketmq_connections_refused", "Remoting connections ended, by the cause", "cause")
        self._checks = counter("rocketmq_checks", "Checks claimed, by outcome", "protocol", "outcome")
        self._checks_out = gauge("rocketmq_checks_out", "Checks that clients have not answered yet", "protocol")
        self._check_seconds = histogram(
            "rocketmq_check_seconds", "Time from a check to its client's answer (s)", SECONDS, "protocol"
        )
        self._held = gauge(
            "rocketmq_messages_held",
            "Messages out to push consumers now, which are renewed while these are connected",
            "protocol",
        )
        self._buffered = gauge(
            "rocketmq_buffered_bytes", "Bytes of requests and claimed messages that the gateway holds now"
        )
        self._api_requests = counter(
            "rocketmq_api_requests", "Requests of the gateway to Halfnote, by the status; none: no answer", "status"
        )
        self._api_seconds = histogram(
            "rocketmq_api_seconds", "Time of a request to Halfnote that waits for nothing (s)", SECONDS
        )

    def answered(self, protocol: Transport, method: str, code: str, seconds: float | None) -> None:
        """Count an answered request. `seconds`: None for a method that waits for messages."""
        self._requests.labels(protocol, method, code).inc()
        if seconds is not None:
            self._request_seconds.labels(protocol, method).observe(seconds)

    def connection_refused(self, cause: Literal["frame", "slow", "unread", "too_many"]) -> None:
        """Count a remoting connection that the gateway ended."""
        self._refused.labels(cause).inc()

    def check(self, protocol: Transport, outcome: CheckOutcome) -> None:
        """Count a claimed check."""
        self._checks.labels(protocol, outcome).inc()

    def check_answered(self, protocol: Transport, seconds: float) -> None:
        """Note how long a client took to answer a check."""
        self._check_seconds.labels(protocol).observe(seconds)

    def api(self, status: str, seconds: float | None) -> None:
        """Count a request to Halfnote. `seconds`: None for one that waits for something to claim."""
        self._api_requests.labels(status).inc()
        if seconds is not None:
            self._api_seconds.observe(seconds)

    def watch(
        self, protocol: Transport, *, clients: Callable[[], int], checks: Callable[[], int], held: Callable[[], int]
    ) -> None:
        """Show how many there are of each, read when the metrics are."""
        self._clients.labels(protocol).set_function(clients)
        self._checks_out.labels(protocol).set_function(checks)
        self._held.labels(protocol).set_function(held)

    def watch_buffered(self, held: Callable[[], int]) -> None:
        """Show how many bytes are held, read when the metrics are."""
        self._buffered.set_function(held)

    def exposition(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)
