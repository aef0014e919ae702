"""The background loops: each is a step that app/runtime/loop_runner.py repeats."""

from app.checkback import claim_loops, ping, registrations, sweep
from app.checkback import loop as checkback_loop
from app.checkback.claim_loops import Lapses, wake_claims
from app.checkback.loop import CheckBack
from app.checkback.ping import Pings
from app.checkback.registrations import Rounds
from app.checkback.sweep import Sweeps
from app.loops import (
    accept_switch,
    announce_findings,
    announce_held_back,
    certificate_reload,
    clock_offset,
    disk_usage,
    gauges,
    live_settings,
    minutes,
    overdue_connections,
    process_usage,
    readiness_gauge,
    timelines,
    worker_state,
)
from app.loops.live_settings import LiveSettingsReader
from app.loops.minutes import ActivityCounter, StandingSampler
from app.loops.process_usage import ProcessUsage
from app.loops.worker_state import WorkerStateWriter
from app.pull import sweep as pull_sweep
from app.pull import wake as pull_wake
from app.relay import unrouted
from app.relay.loop import BURST, EVERY_S, INTERVALS_S, Relay
from app.relay.unrouted import Routing
from app.relay.wakeups import LISTEN_EVERY_S, NOTIFY_EVERY_S, RelayWakeups, listen, notify
from app.retention import heartbeat
from app.retention import loop as retention_loop
from app.runtime.loop_runner import Loop
from app.runtime.state import Runtime
from app.runtime.worker_state import worker_state_file


def all_loops(runtime: Runtime) -> list[Loop]:
    """Return the loops of a process: those that every process runs, and the worker's, which `--role api` leaves out."""
    counter = ActivityCounter(runtime.metrics)
    following = [
        Loop("accept", accept_switch.step, accept_switch.EVERY_S, longest_backoff_s=accept_switch.EVERY_S),
        Loop(
            "live_settings",
            LiveSettingsReader().step,
            live_settings.EVERY_S,
            longest_backoff_s=live_settings.EVERY_S,
        ),
        Loop("clock", clock_offset.step, clock_offset.EVERY_S),
        Loop("connections", overdue_connections.step, overdue_connections.EVERY_S),
        Loop("usage", ProcessUsage().step, process_usage.EVERY_S),
        Loop("activity", counter.step, minutes.COUNT_EVERY_S, None, counter.drain),
        Loop("ready", readiness_gauge.step, readiness_gauge.EVERY_S),
        Loop("notify", notify, NOTIFY_EVERY_S, runtime.wake_ups.notify_due),
        Loop("claims", wake_claims, claim_loops.WAKE_EVERY_S, runtime.waiting_claims.look),
        Loop(
            "waiting",
            pull_wake.wake_consumers,
            pull_wake.EVERY_S,
            runtime.waiting_consumers.look,
            None,
            (pull_wake.INTERVAL_S, pull_wake.INTERVAL_S),
        ),
    ]
    if len(runtime.database.guard.hosts) > 1:
        following.append(Loop("timelines", timelines.step, runtime.settings.timeline_look_s))
    if runtime.certificate is not None:
        reloads = certificate_reload.CertificateReloads(runtime.certificate)
        following.append(Loop("certificate", reloads.step, runtime.settings.tls_reload_s))
    if runtime.settings.role == "api":
        return [*following, Loop("listen", pull_wake.ConsumerListener().step, pull_wake.LISTEN_EVERY_S)]
    relay = Relay(runtime)
    checks, watch, sampler = CheckBack(), Routing(), StandingSampler()

    def checks_due() -> None:
        checks.wake.set()
        runtime.waiting_claims.look.set()

    sweeps = Sweeps(checks_due)
    runtime.database.guard.on_promotion.append(sweeps.forget)
    state_file = worker_state_file()
    # The last: its first turn finds the others begun.
    last = (
        [] if state_file is None else [Loop("worker_state", WorkerStateWriter(state_file).step, worker_state.EVERY_S)]
    )
    return [
        *following,
        Loop("listen", listen, LISTEN_EVERY_S),
        Loop("relay", RelayWakeups(relay).step, EVERY_S, runtime.wake_ups.relay, relay.drain, INTERVALS_S, BURST),
        Loop("consumers", pull_sweep.step, pull_sweep.IDLE_EVERY_S),
        Loop("routing", watch.step, unrouted.EVERY_S, None, watch.drain),
        Loop("sweep", sweeps.step, sweep.EVERY_S, None, sweeps.drain),
        Loop("checks", checks.step, checkback_loop.EVERY_S, checks.wake, checks.drain),
        Loop("lapses", Lapses().step, claim_loops.LAPSES_EVERY_S),
        Loop("rounds", Rounds().step, registrations.EVERY_S),
        Loop("pings", Pings().step, ping.EVERY_S),
        Loop("held_back", announce_held_back.step, announce_held_back.EVERY_S),
        Loop("findings", announce_findings.step, announce_findings.EVERY_S),
        Loop("gauges", gauges.step, gauges.EVERY_S),
        Loop("figures", sampler.step, minutes.LOOK_EVERY_S, None, sampler.drain),
        Loop("disk", disk_usage.DiskUsage().step, disk_usage.EVERY_S),
        Loop(heartbeat.NAME, retention_loop.step, retention_loop.EVERY_S),
        *last,
    ]
