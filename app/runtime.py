"""What one process of the service holds while it runs."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from app.callbacks import CallbackClient
from app.clock import Clock
from app.config import Settings
from app.database import Database
from app.dialling import Dialling
from app.door import Door
from app.flush import Lanes
from app.gate import Gate
from app.load import Load
from app.sealing import Vault
from app.sharing import Shared
from app.telemetry import Metrics
from app.wakeups import WakeUps

if TYPE_CHECKING:  # the one asks this module; the other imports OpenTelemetry, which is there only where it is used
    from app.readiness import DatabaseFound
    from app.tracing import Tracing


@dataclass(slots=True)
class Runtime:
    """The parts that requests and loops share; made at start, closed at stop."""

    settings: Settings
    database: Database
    clock: Clock
    metrics: Metrics
    lanes: Lanes
    door: Door
    dialling: Dialling
    vault: Vault
    gate: Gate
    load: Load
    # Two clients: check-back must not wait for a connection that a slow subscriber holds.
    checks_http: CallbackClient
    deliveries_http: CallbackClient
    wake_ups: WakeUps
    # None: nothing is exported.
    tracing: "Tracing | None" = None
    # Who holds this process's leases.
    owner: str = field(default_factory=lambda: uuid4().hex)
    # Set when new halves are refused: by HALFNOTE_ACCEPT, by `halfnote drain`, or because the process is stopping.
    refusing_halves: bool = False
    stopping: bool = False
    # Whether API keys were read once; the topics that are declared, None if any is taken; what tells of news of them.
    keys_read: bool = False
    declared: frozenset[str] | None = None
    declared_version: str | None = None
    # When each loop last finished a turn (monotonic seconds) and how often it is meant to, for `readyz`.
    heartbeats: dict[str, float] = field(default_factory=dict)
    every_s: dict[str, float] = field(default_factory=dict)
    # What `readyz` and `version` last found in the database: whoever asks them needs no key.
    found: "Shared[DatabaseFound]" = field(default_factory=Shared)
    versions: "Shared[tuple[str | None, str]]" = field(default_factory=Shared)

    def follow_switch(self, accept: str) -> None:
        """Refuse new halves if the switch says `ends`, if the settings do, or if the process is stopping."""
        self.refusing_halves = self.stopping or "ends" in (accept, self.settings.accept)
