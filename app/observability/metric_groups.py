"""The groups of Prometheus families, one class each. `docs/metrics.md` explains every family."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from app.observability.label_limits import OTHER, LimitedLabel
from app.observability.metric_families import DELIVERY_SECONDS, ROWS, SECONDS, Families, LimitedFamily, withdraw
from app.observability.tallies import Tallies, Tally
from app.verdicts import DeadLetterReason


class HttpMetrics:
    """Requests, the flushes that commit them, and what the flushes stored."""

    def __init__(self, families: Families, tallies: Tallies) -> None:
        counter, histogram = families.counter, families.histogram
        self.requests = counter("requests", "Requests answered", "route", "status")
        self.request_seconds = families.batch_histogram(
            "request_seconds", "Time to answer a request (s)", SECONDS, "route"
        )
        self.outcomes = counter(
            "transaction_outcomes", "Outcomes of the transactions of requests that have many", "route", "status"
        )
        self.flush_rows = histogram("flush_rows", "Requests in one flush", ROWS, "lane")
        self.flush_seconds = histogram("flush_seconds", "Time of one flush, commit included (s)", SECONDS, "lane")
        self.queue_depth = families.gauge("queue_depth", "Requests that wait for a flush", "lane", combine="livesum")
        self.halves = counter("halves", "Half messages stored")
        self.verdicts = counter("verdicts", "Verdicts recorded", "verdict", "source")
        self.verdicts_refused = counter(
            "verdicts_refused", "Ends refused because the opposite verdict is recorded", "source"
        )
        self.in_flight = families.gauge("requests_in_flight", "Requests in flight now", combine="livesum")
        self.bodies_held = families.gauge(
            "bodies_held_bytes", "Bytes of bodies of requests in flight now", combine="livesum"
        )
        self._tallies = tallies
        self._counts: dict[tuple[str, int], Tally] = {}
        self._outcome_counts: dict[tuple[str, int], Tally] = {}
        self._seconds: dict[str, list[float]] = {}

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request. `route` is the path's template, so that ids make no new series."""
        count = self._counts.get((route, status))
        if count is None:
            count = self._counts[route, status] = self._tallies.of(self.requests.labels(route, str(status)))
            if route not in self._seconds:
                self._seconds[route] = self._tallies.values_of(self.request_seconds.labels(route))
        count.count += 1
        self._seconds[route].append(seconds)
        self._tallies.publish_soon()

    def observe_outcomes(self, route: str, statuses: Sequence[int]) -> None:
        """Count the outcomes of one request. `route` is the path's template."""
        for status in set(statuses):
            count = self._outcome_counts.get((route, status))
            if count is None:
                labeled = self.outcomes.labels(route, str(status))
                count = self._outcome_counts[route, status] = self._tallies.of(labeled)
            count.count += statuses.count(status)
        self._tallies.publish_soon()


class CheckbackMetrics:
    """Transactions without a verdict, and the checks that ask for it."""

    def __init__(self, families: Families) -> None:
        gauge, measured = families.gauge, families.measured
        self.in_doubt = measured("in_doubt", "Transactions in doubt now")
        self.oldest_in_doubt_s = measured("oldest_in_doubt_seconds", "Age of the oldest transaction in doubt (s)")
        self.parked = measured("parked", "Transactions parked now, which wait for a person")
        self.checks = families.counter("checks", "Checks sent, by outcome", "outcome")
        self.check_seconds = families.histogram("check_seconds", "Time of one check (s)", SECONDS)
        self.check_url_up = gauge(
            "check_url_up", "1 if the URL answered its last check or ping, else 0", "producer_group", "url"
        )


class RelayMetrics:
    """Deliveries, and what each subscription still has to receive."""

    def __init__(self, families: Families, values_max: int) -> None:
        counter, named_gauges = families.counter, families.named_gauges
        # The subscriptions that have counters and histograms of their own.
        self.subscriptions = LimitedLabel[str, str](values_max, str, lambda: OTHER)
        self.unrouted = families.measured(
            "unrouted_messages",
            "Messages that match no subscription, since the database was made; the maximum of all processes",
            combine="livemax",
        )
        deliveries = counter("deliveries", "Delivery attempts, by outcome", "subscription", "outcome")
        expired = counter(
            "expired_messages",
            "Messages that became dead letters because they waited too long",
            "subscription",
            "reason",
        )
        self.waiting_limit_used = named_gauges(
            "waiting_limit_used",
            "Share of the subscription's limits that its waiting messages use; at 1 they become dead letters",
            "subscription",
        )
        delivery_seconds = families.batch_histogram(
            "delivery_seconds", "Time of one delivery attempt (s)", SECONDS, "subscription"
        )
        received = families.batch_histogram(
            "commit_to_received_seconds",
            "Time from a message's commit, or its due time, to the answer of the receiver that took it (s)",
            DELIVERY_SECONDS,
            "subscription",
        )
        self.breaker_open = named_gauges(
            "breaker_open",
            "1 if the circuit breaker of the subscription (of any shard) is open now, else 0",
            "subscription",
        )
        breakers = counter("breakers", "Circuit breakers that opened or closed", "subscription", "what")
        self.lag_s = named_gauges("relay_lag_seconds", "Age of the oldest message not settled (s)", "subscription")
        self.lag_messages = named_gauges(
            "relay_lag_messages", "Log entries not yet read (of any topic) and messages not settled", "subscription"
        )
        self.retries_waiting = named_gauges(
            "retries_waiting",
            "Messages that failed and wait for another attempt, counted up to 10,000 for each subscription",
            "subscription",
        )
        self.oldest_retry_s = named_gauges(
            "oldest_retry_seconds", "Time since the first attempt of the message that fails longest (s)", "subscription"
        )
        self.dead_letters = named_gauges(
            "dead_letters", "Dead letters now, counted up to 100,000 for each subscription", "subscription"
        )
        self.deliveries = LimitedFamily(deliveries, self.subscriptions)
        self.expired = LimitedFamily(expired, self.subscriptions)
        self.breakers = LimitedFamily(breakers, self.subscriptions)
        self.delivery_seconds = LimitedFamily(delivery_seconds, self.subscriptions)
        self.commit_to_received = LimitedFamily(received, self.subscriptions)
        self._counted_from_zero: set[str] = set()
        self._with_limits: dict[str, set[str]] = {}
        self._with_breakers: set[str] = set()
        self._with_dead_letters: set[str] = set()
        self._with_retries: set[str] = set()
        # The subscriptions whose lag each loop shows.
        self._with_lag: dict[str, set[str]] = {}

    def show_dead_letters(self, counts: Mapping[str, int]) -> None:
        """Set `dead_letters` of these subscriptions, and set it to 0 for those that have none any more."""
        for name in self._with_dead_letters | counts.keys():
            self.dead_letters.set(name, counts.get(name, 0))
        self._with_dead_letters = set(counts)

    def show_breakers(self, open_now: Mapping[str, bool]) -> None:
        """Set `breaker_open` of every subscription, and withdraw it for deleted ones."""
        for name, is_open in open_now.items():
            self.breaker_open.set(name, is_open)
        for name in self._with_breakers - open_now.keys():
            self.breaker_open.withdraw(name)
        self._with_breakers = set(open_now)

    def show_limits_used(self, loop: str, used: Mapping[str, float]) -> None:
        """Set `waiting_limit_used` of the subscriptions with limits that `loop` counts; withdraw the others."""
        for name, share in used.items():
            self.waiting_limit_used.set(name, share)
        for name in self._with_limits.get(loop, set()) - used.keys():
            self.waiting_limit_used.withdraw(name)
        self._with_limits[loop] = set(used)

    def count_from_zero(self, subscriptions: Iterable[str]) -> None:
        """Show 0 before the first count: a rise from nothing to 1 is not visible in Prometheus."""
        names = dict.fromkeys(subscriptions)
        # In their order: the first ones have series of their own.
        for name in (name for name in names if name not in self._counted_from_zero):
            for what in ("opened", "closed"):
                self.breakers.labels(name, what)
            for reason in (DeadLetterReason.EXPIRED, DeadLetterReason.BACKLOG):
                self.expired.labels(name, reason)
        self._counted_from_zero = set(names)

    def show_retries(self, retries: Mapping[str, tuple[float, int]]) -> None:
        """Set the retries of every subscription, and withdraw those of deleted ones.

        `retries`: (seconds since the oldest one's first attempt, messages) by subscription.
        """
        for name, (age_s, messages) in retries.items():
            self.oldest_retry_s.set(name, age_s)
            self.retries_waiting.set(name, messages)
        for name in self._with_retries - retries.keys():
            self.oldest_retry_s.withdraw(name)
            self.retries_waiting.withdraw(name)
        self._with_retries = set(retries)

    def show_lags(self, loop: str, lags: Mapping[str, tuple[float, int]]) -> None:
        """Set the lags that `loop` measured, and withdraw those that no loop of this process measures any more.

        `lags`: (seconds, messages) by subscription. A lag ends when its subscription is deleted or moves to another
        worker.
        """
        for name, (age_s, messages) in lags.items():
            self.lag_s.set(name, age_s)
            self.lag_messages.set(name, messages)
        ended = self._with_lag.get(loop, set()) - lags.keys()
        self._with_lag[loop] = set(lags)
        for name in ended.difference(*self._with_lag.values()):
            self.lag_s.withdraw(name)
            self.lag_messages.withdraw(name)


class RetentionMetrics:
    """Held days, and the unfinished transactions and deliveries of removed days."""

    def __init__(self, families: Families, subscriptions: LimitedLabel[str, str]) -> None:
        self.day_held = families.gauge(
            "day_held", "1 while this cause keeps the day past its retention, else 0", "day", "cause"
        )
        self.days_ahead = families.measured("days_ahead", "Days after today that have partitions")
        self.database_bytes = families.measured("database_bytes", "Size of the database on disk (bytes)")
        self.day_bytes = families.gauge(
            "day_bytes", "Size on disk of the tables of a day that is not removed (bytes)", "day"
        )
        self.free_bytes = families.gauge(
            "database_free_bytes", "Bytes by which the database may still grow, where they are known", "source"
        )
        self.hours_to_full = families.gauge(
            "database_hours_to_full",
            "Hours until the database's disk is full, at the growth of the last hours",
            "source",
        )
        self.left_undecided = families.counter(
            "left_undecided", "Transactions whose day was removed before they had a verdict"
        )
        left_undelivered = families.counter(
            "left_undelivered", "Messages that became dead letters because their day was removed", "subscription"
        )
        self.left_undelivered = LimitedFamily(left_undelivered, subscriptions)
        self._counted_from_zero: set[str] = set()
        self._held: set[tuple[str, str]] = set()
        self._with_bytes: set[str] = set()

    def show_bytes(self, database: int, days: Mapping[str, int]) -> None:
        """Set the sizes of the database and of each day, and withdraw those of removed days."""
        self.database_bytes.set(database)
        for day, size in days.items():
            self.day_bytes.labels(day).set(size)
        for day in self._with_bytes - days.keys():
            withdraw(self.day_bytes, day)
        self._with_bytes = set(days)

    def show_disk(self, source: str, free: int | None, hours_to_full: float | None) -> None:
        """Set the free bytes and the hours to full, or withdraw what is not known."""
        for gauge, value in ((self.free_bytes, free), (self.hours_to_full, hours_to_full)):
            if value is not None:
                gauge.labels(source).set(value)
            else:
                withdraw(gauge, source)

    def show_held(self, held: set[tuple[str, str]]) -> None:
        """Set `day_held` to 1 for these (day, cause), and to 0 for those that no longer hold."""
        for day, cause in held | self._held:
            self.day_held.labels(day, cause).set((day, cause) in held)
        self._held = held

    def count_from_zero(self, subscriptions: Iterable[str]) -> None:
        """Show 0 before the first count: a rise from nothing to 1 is not visible in Prometheus."""
        names = dict.fromkeys(subscriptions)
        for name in (name for name in names if name not in self._counted_from_zero):
            self.left_undelivered.labels(name)
        self._counted_from_zero = set(names)


class ProofMetrics:
    """The nightly proof's last runs and open findings."""

    def __init__(self, families: Families) -> None:
        gauge, measured = families.gauge, families.measured
        self.age_s = measured(
            "reconciliation_age_seconds", "Time since the nightly proof last ended; +Inf if it never ran (s)"
        )
        self.proved_age_s = measured(
            "reconciliation_proved_age_seconds",
            "Time since the nightly proof last ended without a finding; +Inf if it never did (s)",
        )
        self.run_s = measured("reconciliation_run_seconds", "Duration of the nightly proof's last run (s)")
        self.state = gauge("reconciliation_state", "1 for the outcome of the last run, else 0", "state")
        self.findings = gauge("reconciliation_findings", "Open findings", "kind")
        self.days = gauge("reconciliation_days", "Days that the nightly proof has read", "state")
        # The run whose findings are shown, and when they were counted.
        self.shown_run: int | None = None
        self.shown_at = datetime.min.replace(tzinfo=UTC)
        self._with_findings: set[str] = set()

    def show_findings(self, counts: Mapping[str, int]) -> None:
        """Set the open findings of these kinds, and set those of kinds that have none any more to 0."""
        for kind in self._with_findings | counts.keys():
            self.findings.labels(kind).set(counts.get(kind, 0))
        self._with_findings = set(counts)


class ProcessMetrics:
    """The state of one process: its readiness, loops, clock and keys, and whether workers keep up."""

    def __init__(self, families: Families) -> None:
        gauge = families.gauge
        self.ready = gauge("ready", "1 if the process can do its work, as /readyz says, else 0", combine="livemin")
        self.loop_age_s = gauge(
            "loop_age_seconds", "Time since a loop last finished a turn (s)", "loop", combine="livemax"
        )
        self.loop_late = gauge("loop_late", "1 if a loop is late, as /readyz says, else 0", "loop", combine="livemax")
        self.oldest_due_s = gauge(
            "oldest_due_seconds",
            "Time that the oldest check, or delivery after its first attempt, has waited for a worker (s)",
            "what",
        )
        self.cpu_s = families.counter("cpu_seconds", "CPU time, user and system (s)")
        self.memory_bytes = gauge("memory_bytes", "Resident memory (bytes)", combine="livesum")
        self.open_files = gauge("open_files", "Open file descriptors, of the process with the most", combine="livemax")
        self.open_files_max = gauge("open_files_max", "Limit of file descriptors of one process", combine="livemin")
        self.pool_in_use = gauge("pool_connections_in_use", "Pool connections in use now", combine="livesum")
        self.pool_size = gauge("pool_connections_max", "Pool connections that there may be", combine="livesum")
        self.build = gauge("build_info", "1, with the versions as labels", "version", "python", combine="livemax")
        self.clock_skew_s = gauge("clock_skew_seconds", "Database clock minus this process's clock (s)")
        self.secrets_unreadable = families.measured(
            "secrets_unreadable", "Secrets sealed by keys that the key file lacks"
        )
        self.tls_expires = gauge(
            "tls_certificate_expires_timestamp_seconds",
            "End of the validity of the service's own certificate, as Unix time (s)",
            # With a label there is no series, and no alert, without TLS.
            "file",
            combine="livemin",
        )
        self.tls_not_reloaded = gauge(
            "tls_certificate_not_reloaded",
            "1 if the files of the certificate or the key changed and cannot be used, else 0",
            "file",
            combine="livemax",
        )
