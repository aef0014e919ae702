"""Logs and metrics: structlog lines (JSON unless a person watches) and the Prometheus families, each named once."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal

import asyncpg
import psutil
import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.trace_context import current, log_fields

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 5, 10, 20, 50, 100, 200, 500)

# How a gauge adds up over the live processes of one service.
AddsUp = Literal["livemostrecent", "livesum", "livemax", "livemin"]


def set_up_logs(*, terminal: bool | None = None) -> None:
    """Send every log line, ours and the libraries', through structlog: key=value on a terminal, JSON otherwise."""
    on_terminal = sys.stderr.isatty() if terminal is None else terminal
    shared: list[structlog.typing.Processor] = [
        without_rows,
        structlog.contextvars.merge_contextvars,
        with_trace,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    tail: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors=on_terminal, exception_formatter=structlog.dev.plain_traceback)]
        if on_terminal
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *tail]
    )
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(formatter)
    logging.basicConfig(handlers=[out], level=logging.INFO, force=True)
    for own in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(own).handlers.clear()
        # Access lines go nowhere; where uvicorn finds no handler, it does not even put one into words.
        logging.getLogger(own).propagate = own != "uvicorn.access"
    for chatty in ("alembic", "httpx", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # Each of their own tries in vain would be a line; what became of a delivery is told by its outcome.
    for client in ("aiokafka", "aio_pika", "aiormq", "nats"):
        logging.getLogger(client).setLevel(logging.CRITICAL)


def with_trace(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Name the trace and the span that a line belongs to, unless it names its own."""
    for name, value in log_fields(current.get()).items():
        fields.setdefault(name, value)
    return fields


def without_rows(logger: Any, method: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Take out what Postgres adds to some errors: the row it refused, and so perhaps a message's body.

    The detail always comes after the error's own text, so everything from it on is cut.
    """
    for name, value in fields.items():
        if isinstance(value, str):
            fields[name] = value.partition("\nDETAIL:")[0]
    _forget_rows(_exception_of(fields.get("exc_info")))
    return fields


def _exception_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, BaseException):
        return exc_info
    if isinstance(exc_info, tuple):
        return exc_info[1]  # type: ignore[no-any-return]
    return sys.exc_info()[1] if exc_info else None


def _forget_rows(error: BaseException | None) -> None:
    """Take the detail out of an exception and out of those it came from, before a traceback prints them."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, asyncpg.PostgresError):
            error.detail = None
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        waiting += [error.__cause__, error.__context__]


class Metrics:
    """The Prometheus families of one process. Gauges that describe the database are set by whoever measures them."""

    def __init__(self) -> None:
        # When a series was made is of no use, and doubles their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        counter, histogram, gauge = self._counter, self._histogram, self._gauge
        self.requests = counter("requests", "Requests answered", "route", "status")
        self.request_seconds = histogram("request_seconds", "Time to answer a request (s)", SECONDS, "route")
        self.flush_rows = histogram("flush_rows", "Requests in one flush", ROWS, "lane")
        self.flush_seconds = histogram("flush_seconds", "Time of one flush, commit included (s)", SECONDS, "lane")
        self.queue_depth = gauge("queue_depth", "Requests waiting for a flush", "lane", adds_up="livesum")
        self.halves = counter("halves", "Half messages stored")
        self.verdicts = counter("verdicts", "Verdicts recorded", "verdict", "source")
        self.verdicts_refused = counter(
            "verdicts_refused", "Ends refused because the opposite verdict stands", "source"
        )
        self.in_doubt = gauge("in_doubt", "Transactions in doubt now")
        self.oldest_in_doubt_s = gauge("oldest_in_doubt_seconds", "Age of the oldest transaction in doubt (s)")
        self.parked = gauge("parked", "Transactions that wait for a person")
        self.checks = counter("checks", "Checks asked, by outcome", "outcome")
        self.check_seconds = histogram("check_seconds", "Time of one check (s)", SECONDS)
        self.check_url_up = gauge(
            "check_url_up", "1 if the URL's last check or ping was answered", "producer_group", "url"
        )
        self.unrouted = gauge(
            "unrouted_messages", "Messages that no subscription takes, since this process started", adds_up="livesum"
        )
        self.deliveries = counter("deliveries", "Delivery attempts, by outcome", "subscription", "outcome")
        self.delivery_seconds = histogram(
            "delivery_seconds", "Time of one delivery attempt (s)", SECONDS, "subscription"
        )
        self.oldest_due_s = gauge(
            "oldest_due_seconds",
            "How long the oldest check, or delivery after its first try, waits for a worker (s)",
            "what",
        )
        self.breakers = counter("breakers", "Breakers that opened or closed", "subscription", "what")
        self.relay_lag_s = gauge("relay_lag_seconds", "Age of the oldest message not settled (s)", "subscription")
        self.relay_lag_messages = gauge(
            "relay_lag_messages", "Log entries not yet read (of any topic) and messages not settled", "subscription"
        )
        self.retries_waiting = gauge(
            "retries_waiting",
            "Messages tried in vain that will be tried again, counted up to 10,000 for each subscription",
            "subscription",
        )
        self.oldest_retry_s = gauge(
            "oldest_retry_seconds",
            "Time since the first try of the one that has failed for longest (s)",
            "subscription",
        )
        self.dead_letters = gauge(
            "dead_letters", "Dead letters now, counted up to 100,000 for each subscription", "subscription"
        )
        self.day_held = gauge("day_held", "1 for what keeps a day past its retention", "day", "cause")
        self.left_undecided = counter("left_undecided", "Transactions whose day left before they had a verdict")
        self.left_undelivered = counter(
            "left_undelivered", "Messages made dead letters because their day left", "subscription"
        )
        self.reconciliation_age_s = gauge(
            "reconciliation_age_seconds", "Time since the nightly proof last ended; +Inf if it never ran (s)"
        )
        self.reconciliation_proved_age_s = gauge(
            "reconciliation_proved_age_seconds", "Time since it last ended without a finding; +Inf if it never did (s)"
        )
        self.reconciliation_run_s = gauge("reconciliation_run_seconds", "How long its last run took (s)")
        self.reconciliation_state = gauge("reconciliation_state", "1 for what its last run came to", "state")
        self.reconciliation_findings = gauge("reconciliation_findings", "Open findings", "kind")
        self.reconciliation_days = gauge("reconciliation_days", "Days that it has looked at", "state")
        self.secrets_plain = gauge(
            "secrets_plain_rows", "Producer groups and subscriptions that have secrets in plain text"
        )
        self.secrets_unreadable = gauge("secrets_unreadable", "Secrets sealed by keys that the key file lacks")
        self.loop_age_s = gauge(
            "loop_age_seconds", "Time since a loop last finished a turn (s)", "loop", adds_up="livemax"
        )
        self.ready = gauge("ready", "1 if the process can do its work, as /readyz says", adds_up="livemin")
        self.clock_skew_s = gauge("clock_skew_seconds", "Database clock minus this process's (s)")

        self._seen: dict[tuple[str, int], Counter] = {}
        self._timed: dict[str, Histogram] = {}
        self._held: set[tuple[str, str]] = set()
        self._with_dead_letters: set[str] = set()
        self._with_retries: set[str] = set()
        # The subscriptions whose lag each loop shows.
        self._lagging: dict[str, set[str]] = {}
        self._with_findings: set[str] = set()
        # The run of the nightly proof whose findings are shown.
        self.shown_run: int | None = None

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is the path's template, so that ids make no new series."""
        count = self._seen.get((route, status))
        if count is None:
            count = self._seen[route, status] = self.requests.labels(route, str(status))
            self._timed[route] = self.request_seconds.labels(route)
        count.inc()
        self._timed[route].observe(seconds)

    def show_held(self, held: set[tuple[str, str]]) -> None:
        """Set `day_held` to 1 for these (day, cause) and to 0 for those that no longer hold."""
        for day, cause in held | self._held:
            self.day_held.labels(day, cause).set((day, cause) in held)
        self._held = held

    def show_dead_letters(self, counts: Mapping[str, int]) -> None:
        """Set `dead_letters` of these subscriptions, and to 0 that of those that are gone."""
        for name in self._with_dead_letters | counts.keys():
            self.dead_letters.labels(name).set(counts.get(name, 0))
        self._with_dead_letters = set(counts)

    def count_from_zero(self, subscriptions: Iterable[str]) -> None:
        """Show 0 of what may never happen to a subscription, or once: from a count that begins with 1 nobody can tell
        that it rose."""
        for name in subscriptions:
            self.left_undelivered.labels(name)
            for what in ("opened", "closed"):
                self.breakers.labels(name, what)

    def show_retries(self, retries: Mapping[str, tuple[float, int]]) -> None:
        """Set the retries, (s since the oldest's first try, messages), of all subscriptions, and take away those of
        subscriptions that are gone."""
        for name, (age_s, messages) in retries.items():
            self.oldest_retry_s.labels(name).set(age_s)
            self.retries_waiting.labels(name).set(messages)
        for name in self._with_retries - retries.keys():
            withdraw(self.oldest_retry_s, name)
            withdraw(self.retries_waiting, name)
        self._with_retries = set(retries)

    def show_lags(self, by: str, lags: Mapping[str, tuple[float, int]]) -> None:
        """Set the lags, (s, messages) by subscription, that the loop `by` sees, and take away those that it saw and no
        loop of this process sees any more: of what was deleted, or is another worker's."""
        for name, (age_s, messages) in lags.items():
            self.relay_lag_s.labels(name).set(age_s)
            self.relay_lag_messages.labels(name).set(messages)
        gone = self._lagging.get(by, set()) - lags.keys()
        self._lagging[by] = set(lags)
        for name in gone.difference(*self._lagging.values()):
            withdraw(self.relay_lag_s, name)
            withdraw(self.relay_lag_messages, name)

    def show_findings(self, counts: Mapping[str, int]) -> None:
        """Set the open findings of these kinds, and to 0 those of kinds that have none any more."""
        for kind in self._with_findings | counts.keys():
            self.reconciliation_findings.labels(kind).set(counts.get(kind, 0))
        self._with_findings = set(counts)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"halfnote_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"halfnote_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str, adds_up: AddsUp = "livemostrecent") -> Gauge:
        return Gauge(f"halfnote_{name}", text, labels, registry=self.registry, multiprocess_mode=adds_up)

    def exposition(self) -> bytes:
        """Return the text that `/metrics` answers, over all processes of one `halfnote serve --workers N`."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        _withdraw_dead(Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]))
        together = CollectorRegistry()
        together.register(_Together())
        return generate_latest(together)


def withdraw(gauge: Gauge, *labels: str) -> None:
    """Take a series of a gauge out of what `/metrics` answers."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        # The files that processes share know no removal; `_Together` leaves out what is not a number.
        gauge.labels(*labels).set(nan)
    else:
        gauge.remove(*labels)


class _Together(Collector):
    """The families of all processes, without the series that were withdrawn."""

    def collect(self) -> Iterator[Metric]:
        for family in multiprocess.MultiProcessCollector(None).collect():  # type: ignore[no-untyped-call]
            family.samples = [sample for sample in family.samples if not isnan(sample.value)]
            yield family


def _withdraw_dead(directory: Path) -> None:
    """Take the gauges of processes that are gone, however they ended, out of their siblings' answer."""
    for file in directory.glob("gauge_live*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not psutil.pid_exists(pid):
            multiprocess.mark_process_dead(pid, str(directory))  # type: ignore[no-untyped-call]
