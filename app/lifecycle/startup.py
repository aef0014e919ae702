"""Start and stop one process of the service: database, clock, commit lanes, loops; and drain it at SIGTERM."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from app.admission.authenticator import Authenticator
from app.admission.load_limits import LoadLimits
from app.admission.request_guard import RequestGuard
from app.clock import FIRST_MEASURES, Clock
from app.config import Settings, unknown_variables
from app.coordinator.commit_lanes import CommitLanes
from app.coordinator.group_commit import LaneLimits
from app.database.connection import LOOP_CONNECTIONS, Connection, Database, PoolShare
from app.database.keyed_share import KeyedShare
from app.database.notifier import WakeUps
from app.database.timelines import LookTimes
from app.egress.http_client import callback_client
from app.egress.network_policy import NetworkPolicy
from app.lifecycle.database import prepared_database
from app.lifecycle.loops import all_loops
from app.lifecycle.signals import on_shutdown_signal
from app.observability.metrics import Metrics
from app.runtime.live_settings import follow
from app.runtime.loop_runner import Loop, run
from app.runtime.publications import Publications
from app.runtime.server_certificate import ServerCertificate
from app.runtime.state import Runtime
from app.runtime.state_feed import StateFeed
from app.runtime.wake_up_socket import join_worker_beside
from app.runtime.worker_state import worker_state_file
from app.secrets.vault import Vault
from app.store.checkback import producer_groups
from app.store.coordinator import topics
from app.store.proof.shared_settings import LONGEST_ID_SKEW, raise_rule, read_rule
from app.store.subscriptions import subscriptions

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.observability.tracing import Tracing

log = structlog.get_logger(__name__)

# The part of the drain time after which a hanging flush is given up.
GIVES_UP_AFTER = 0.8
# Drain time of the loops even if the last requests used up the rest.
LEAST_DRAIN_S = 0.5
COLLECT_AFTER = 10_000
# The most bytes of an answer of the issuer of OpenID Connect: its metadata, its keys with their certificates, a token.
ISSUER_LIMIT_BYTES = 256 * 1024


def log_open_networks(settings: Settings) -> None:
    """Log that callbacks may reach this machine's ports because no setting says otherwise."""
    if settings.embedded and settings.allow_networks is None:
        log.info(
            "callbacks_may_go_to_loopback",
            networks=",".join(settings.opened_networks),
            because="the Postgres is the embedded one, and HALFNOTE_ALLOW_NETWORKS is not set",
        )


def log_unknown_variables(environment: Mapping[str, str]) -> None:
    """Log each variable that looks like a setting and is none: a typing error would change nothing silently."""
    for name, nearest in unknown_variables(environment).items():
        log.warning("unknown_setting", variable=name, nearest=nearest, all="docs/configuration.md")


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Runtime]:
    """Yield a running service and drain it at the end: loops finish their step, leases are released, lanes flush."""
    log_open_networks(settings)
    log_unknown_variables(os.environ)
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(prepared_database(settings))
        runtime = await assemble(settings, database.url, stack, database.home)
        stopping = asyncio.Event()
        # An API process beside this worker logs it.
        if settings.role != "worker" or worker_state_file() is None:
            log_auth_state(runtime)
        loops = all_loops(runtime)
        turning = [asyncio.create_task(run(loop, runtime, stopping), name=loop.name) for loop in loops]
        freeze_startup_objects()
        ends_at: list[float] = []

        def begin() -> None:
            runtime.stopping = runtime.refusing_halves = True
            stopping.set()
            runtime.waiting_claims.close()
            runtime.waiting_consumers.close()
            runtime.state_feed.close()
            if runtime.beside is not None:
                runtime.beside.begin_drain()
            ends_at.append(monotonic() + settings.drain_s)
            # Before the web server cuts off its requests, so that they get an answer.
            asyncio.get_running_loop().call_later(settings.drain_s * GIVES_UP_AFTER, runtime.lanes.give_up)

        with on_shutdown_signal(begin):
            try:
                yield runtime
            finally:
                begin()
                await _drain(turning, loops, max(LEAST_DRAIN_S, ends_at[0] - monotonic()))


def freeze_startup_objects() -> None:
    """Exclude objects made at the start from garbage collection, and let the youngest generation grow.

    A request leaves a few hundred short-lived objects; by default each 700th allocation starts a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


async def share_id_skew(connection: Connection, seconds: int) -> None:
    """Store the largest difference between a new id's time and its half's birth that any process permitted.

    Sweeps, upkeep and the nightly proof use it. Almost every start only reads.
    """
    known = await read_rule(connection, LONGEST_ID_SKEW)
    if known is None or known < seconds:
        await raise_rule(connection, LONGEST_ID_SKEW, seconds)


async def assemble(settings: Settings, dsn: str, stack: AsyncExitStack, embedded_home: Path | None = None) -> Runtime:
    """Make the parts of one process over a migrated database; `stack` closes them in turn.

    `embedded_home`: the directory of the embedded Postgres, if it is one.
    """
    database = Database(
        dsn,
        pool_size=settings.pool_size,
        pool_timeout_s=settings.pool_timeout_s,
        look_times=LookTimes(settings.timeline_look_s, settings.timeline_look_timeout_s),
    )
    stack.push_async_callback(database.close)
    claim_connections = KeyedShare(database, settings.claim_connections)
    stack.push_async_callback(claim_connections.close)
    clock = Clock()
    async with database.connection() as connection:
        # The first has nothing to be compared with, so it must not be the only one.
        for _ in range(FIRST_MEASURES):
            await clock.measure(connection)
        await share_id_skew(connection, settings.id_skew_s)
    if database.guard.unreadable is not None:
        log.warning("timeline_unreadable", because=database.guard.unreadable, effect="a former primary is not refused")
    metrics = Metrics(settings.metrics_values_max)
    limits = LaneLimits(settings.batch_max, settings.queue_max, settings.linger_s, settings.flush_timeout_s)
    wake_ups = WakeUps(database)
    stack.push_async_callback(wake_ups.close)
    publications = Publications(wake_ups, clock)
    beside = join_worker_beside(wake_ups, settings.role, publications.received)
    if beside is not None:
        stack.callback(beside.close)
    tracing = open_tracing(settings)
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    # An API process without a worker beside it has no relay that could take messages.
    recent_bytes = 0 if settings.role == "api" and beside is None else settings.recent_halves_bytes
    lanes = CommitLanes(database, clock, metrics, limits, publications.published, tracing, recent_bytes)
    stack.push_async_callback(lanes.close)
    network_policy = NetworkPolicy.of(settings)
    checks_http = await stack.enter_async_context(callback_client(network_policy))
    deliveries_http = await stack.enter_async_context(callback_client(network_policy))
    issuer_http = await stack.enter_async_context(callback_client(network_policy, ISSUER_LIMIT_BYTES))
    runtime = Runtime(
        settings=settings,
        embedded_home=embedded_home,
        database=database,
        request_pool=PoolShare(database, max(1, settings.pool_size - LOOP_CONNECTIONS)),
        claim_connections=claim_connections,
        clock=clock,
        metrics=metrics,
        lanes=lanes,
        guard=RequestGuard(settings),
        network_policy=network_policy,
        vault=Vault(settings.key_file),
        authenticator=Authenticator(settings, clock),
        load_limits=LoadLimits(settings, metrics.traffic.refused),
        checks_http=checks_http,
        deliveries_http=deliveries_http,
        issuer_http=issuer_http,
        wake_ups=wake_ups,
        publications=publications,
        state_feed=StateFeed(settings.event_streams_max),
        beside=beside,
        tracing=tracing,
        certificate=server_certificate(settings),
        refusing_halves=settings.accept == "ends",
    )
    database.guard.on_promotion.append(runtime.forget)
    wake_ups.on_wake = runtime.waiting_consumers.may_be_due
    stack.push_async_callback(runtime.found.close)
    stack.push_async_callback(runtime.state_feed.end)
    stack.push_async_callback(runtime.versions.close)
    stack.push_async_callback(runtime.expositions.close)
    # Before the first request: until the keys are read, no key is known.
    await follow(runtime, clock.now())
    await show_traffic_from_zero(runtime)
    return runtime


async def show_traffic_from_zero(runtime: Runtime) -> None:
    """Let the oldest producer groups, topics and subscriptions have series, in all processes and after all starts."""
    most = runtime.settings.metrics_values_max
    async with runtime.database.connection() as connection:
        groups = await producer_groups.oldest(connection, most)
        runtime.metrics.traffic.learn(groups, await topics.oldest(connection, most))
        runtime.metrics.relay.subscriptions.learn(await subscriptions.oldest(connection, most))


def log_auth_state(runtime: Runtime) -> None:
    """Log that auth is off, or that no admin's key exists to make keys over HTTP."""
    if runtime.authenticator.off:
        log.warning(
            "auth_off",
            what="every caller on this machine may do everything",
            change="HALFNOTE_AUTH=keys, docs/keys.md",
        )
    elif not runtime.authenticator.has_admin:
        log.warning("no_admin_key", change="halfnote keys create --role admin, or HALFNOTE_ADMIN_KEY_FILE")


def server_certificate(settings: Settings) -> ServerCertificate | None:
    """Return the service's own certificate if it speaks TLS. Raises BadCertificate."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerCertificate(settings.tls_cert, settings.tls_key)


def open_tracing(settings: Settings) -> "Tracing | None":
    """Return the tracing if spans are exported. OpenTelemetry is imported only then."""
    if settings.otlp_endpoint is None:
        return None
    from app.observability.tracing import Tracing

    return Tracing(settings.otlp_endpoint, settings.trace_ratio)


async def _drain(turning: list[asyncio.Task[None]], loops: list[Loop], within_s: float) -> None:
    if not turning:
        return
    _, late = await asyncio.wait(turning, timeout=within_s)
    for loop in late:
        log.warning("drain_cut_short", loop=loop.get_name())
        loop.cancel()
    await asyncio.gather(*turning, return_exceptions=True)
