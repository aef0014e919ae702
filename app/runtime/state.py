"""The parts of one running process of the service."""

import asyncio
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING
from uuid import uuid4

from app.admission.authenticator import Authenticator
from app.admission.load_limits import LoadLimits
from app.admission.request_guard import RequestGuard
from app.clock import Clock
from app.config import Settings
from app.coordinator.commit_lanes import CommitLanes
from app.database.connection import Database, PoolShare
from app.database.keyed_share import KeyedShare
from app.database.notifier import WakeUps
from app.egress.http_client import EgressClient
from app.egress.network_policy import NetworkPolicy
from app.observability.metrics import Metrics
from app.policy.day_failures import DayFailure
from app.runtime.loop_lateness import is_late
from app.runtime.publications import Publications
from app.runtime.server_certificate import ServerCertificate
from app.runtime.single_flight import SingleFlight
from app.runtime.state_feed import StateFeed
from app.runtime.waiting_claims import WaitingClaims
from app.runtime.wake_up_socket import WakeUpReceiver, WakeUpSender
from app.secrets.vault import Vault
from app.store.pull.claims import PulledSubscription
from app.store.retention.day_blockers import DayReaders, SubscriptionRoute
from app.store.retention.day_changes import DayLook

if TYPE_CHECKING:  # OpenTelemetry is an optional dependency
    from app.observability.tracing import Tracing
    from app.runtime.health_checks import DatabaseFound

# How many requests for halves look at once whether their half is stored, if a new one would be refused.
REPEAT_LOOKS = 2


@dataclass(slots=True)
class Runtime:
    """The parts that requests and loops share. Created at start, closed at stop."""

    settings: Settings
    # The directory of the embedded Postgres; None: the database is the user's own.
    embedded_home: Path | None
    database: Database
    # The part of the pool that requests use, so that a burst of them leaves connections to the loops and to `readyz`.
    request_pool: PoolShare
    # For consumers that claim messages.
    claim_connections: KeyedShare
    clock: Clock
    metrics: Metrics
    lanes: CommitLanes
    guard: RequestGuard
    network_policy: NetworkPolicy
    vault: Vault
    authenticator: Authenticator
    load_limits: LoadLimits
    # Two clients, so that check-back never waits for a connection of a slow subscriber.
    checks_http: EgressClient
    deliveries_http: EgressClient
    # For the issuer of OpenID Connect, whose answers may be longer.
    issuer_http: EgressClient
    wake_ups: WakeUps
    publications: Publications
    # For the open streams of `GET /events`.
    state_feed: StateFeed
    # The requests that wait for a check of their producer group.
    waiting_claims: WaitingClaims = field(default_factory=WaitingClaims)
    # Consumers that wait for messages of subscriptions, by the id of the subscription.
    waiting_consumers: WaitingClaims = field(default_factory=WaitingClaims)
    # The socket between the API processes and the worker of one `halfnote serve`.
    beside: WakeUpSender | WakeUpReceiver | None = None
    # None: traces are not exported.
    tracing: "Tracing | None" = None
    # None: the service speaks plain HTTP.
    certificate: ServerCertificate | None = None
    # The owner of this process's leases.
    owner: str = field(default_factory=lambda: uuid4().hex)
    # True while new halves are refused: by HALFNOTE_ACCEPT, by `halfnote drain`, or because the process stops.
    refusing_halves: bool = False
    stopping: bool = False
    # For the looks whether a half that would be refused is stored already.
    repeat_looks: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REPEAT_LOOKS))
    # Whether the API keys, and the declared topics, were read from this server; the declared topics, None if any topic
    # is accepted; the version of that list.
    keys_read: bool = False
    topics_read: bool = False
    declared: frozenset[str] | None = None
    declared_version: str | None = None
    # When the skew of this machine's clock was logged last; None: it is not over a second.
    skew_logged_at: datetime | None = None
    # For each loop, the monotonic seconds of its last finished turn, and its interval; for `readyz`.
    heartbeats: dict[str, float] = field(default_factory=dict)
    every_s: dict[str, float] = field(default_factory=dict)
    # Whether the last step of upkeep failed, or has not ended.
    upkeep_failures: int = 0
    # The last results of `readyz` and `version` from the database. Both calls need no key, so they are shared.
    found: "SingleFlight[DatabaseFound]" = field(default_factory=SingleFlight)
    versions: "SingleFlight[tuple[str | None, str]]" = field(default_factory=SingleFlight)
    # Requests for the metrics share the answer that is being made, and no earlier one.
    expositions: SingleFlight[bytes] = field(default_factory=lambda: SingleFlight(0.0))

    # Subscriptions whose messages consumers claim, by name, as they were read last: see `app.routers.claims`.
    pulled: dict[str, PulledSubscription] = field(default_factory=dict)
    # For each day that is being closed, the database transactions that may have read it as open.
    day_readers: dict[date, DayReaders] = field(default_factory=dict)
    # For each day that waits only for its archive, or contradicts it, the last look at its rows.
    day_looks: dict[date, DayLook] = field(default_factory=dict)
    # For each day that could not be removed, or counted to mark it as decided, the last failure.
    removal_failures: dict[date, DayFailure] = field(default_factory=dict)
    count_failures: dict[date, DayFailure] = field(default_factory=dict)
    # For each day that is held, up to which offset its log is settled.
    day_settled_to: dict[date, dict[SubscriptionRoute, int]] = field(default_factory=dict)

    def forget(self) -> None:
        """Read again what was read before a promotion: there, the same versions may be of other rows."""
        self.keys_read = self.topics_read = False
        self.pulled.clear()
        self.day_readers.clear()
        self.day_looks.clear()
        self.removal_failures.clear()
        self.count_failures.clear()

    def show_loop_ages(self) -> None:
        """Set the gauges of the time since each loop of this process turned, and of whether it is late."""
        for name, beat in self.heartbeats.items():
            age_s = monotonic() - beat
            self.metrics.process.loop_age_s.labels(name).set(age_s)
            self.metrics.process.loop_late.labels(name).set(is_late(age_s, self.every_s.get(name, 0.0)))

    def follow_switch(self, accept: str) -> None:
        """Refuse new halves if the switch or the settings say `ends`, or if the process stops."""
        self.refusing_halves = self.stopping or "ends" in (accept, self.settings.accept)
