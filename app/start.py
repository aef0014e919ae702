"""Starting and stopping one process of the service: database, clock, lanes, loops; and the drain at SIGTERM."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import structlog

from app.access import Caller
from app.callbacks import callback_client
from app.clock import Clock
from app.config import Settings
from app.database import Database, UnusableDatabase, refuse_unusable
from app.dialling import Dialling
from app.door import Door
from app.embedded import EmbeddedPostgres
from app.flush import Lanes
from app.following import follow
from app.gate import Gate
from app.lanes import LaneLimits
from app.load import Load
from app.loops import all_loops
from app.loops.runner import Loop, rest, run
from app.migrate import current, head, migrate, refuse_newer, serves
from app.resealing import Rotation, rotate
from app.runtime import Runtime
from app.sealing import BadKeyFile, Vault, make_key_file, read_keys
from app.secrets_state import ROTATE, secrets_state
from app.stopping import heard
from app.telemetry import Metrics
from app.wakeups import WakeUps

if TYPE_CHECKING:  # it imports OpenTelemetry
    from app.tracing import Tracing

log = structlog.get_logger(__name__)

WATCH_EVERY_S = 1.0
# The part of the drain after which a flush that hangs is given up.
GIVES_UP_AFTER = 0.8
# What loops get of the drain even if the last requests took all of it.
LEAST_DRAIN_S = 0.5
COLLECT_AFTER = 10_000


async def refuse_behind(dsn: str) -> None:
    """Raise UnusableDatabase unless the user's database is at this version's schema, or a later one that serves it."""
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as connection:
            revision = await current(connection)
            served = await serves(connection, revision)
    finally:
        await database.close()
    if not served:
        refuse_newer(revision)
        raise UnusableDatabase(
            f"The database is at revision {revision or 'none'}; this version of Halfnote needs {head()}. "
            "Run `halfnote migrate` with the same HALFNOTE_DATABASE_URL, then start again."
        )


@asynccontextmanager
async def database_url(settings: Settings) -> AsyncIterator[str]:
    """Yield where the database is: the user's own, checked, or the embedded one, started, migrated and watched.

    Raises UnusableDatabase or EmbeddedPostgresError, whose text says what to do.
    """
    if settings.database_url:
        await refuse_unusable(settings.database_url)
        await refuse_behind(settings.database_url)
        refuse_without_keys(settings.key_file)
        await _say_what_secrets_lack(settings.database_url, settings.key_file)
        yield settings.database_url
        return
    server = await _embedded(settings.data_dir)
    stopping = asyncio.Event()
    watcher = asyncio.create_task(_watch(server, stopping))
    try:
        await migrate(server.url, days_ahead=settings.days_ahead)
        # Nobody else serves there, so nobody else must read what is in plain text.
        done = await seal_all(server.url, settings.key_file)
        if done.unreadable:
            log.error("secrets_unreadable", problems=done.unreadable)
        yield server.url
    finally:
        stopping.set()
        await watcher
        await asyncio.to_thread(server.stop)


def refuse_without_keys(key_file: Path | None) -> None:
    """Raise UnusableDatabase if there are no keys to seal secrets by."""
    if key_file is None:
        raise UnusableDatabase(
            "HALFNOTE_SECRETS_KEY_FILE is not set: webhooks' secrets and brokers' passwords are sealed in the database "
            "by the keys of that file. Make one, for all replicas the same, readable by the service alone, and keep a "
            "copy apart from the database's: `(umask 077; halfnote new-secrets-key >> secrets.keys)`"
        )
    try:
        read_keys(key_file)
    except BadKeyFile as error:
        raise UnusableDatabase(f"HALFNOTE_SECRETS_KEY_FILE: {error}. `halfnote new-secrets-key` prints one.") from None


async def seal_all(dsn: str, key_file: Path | None, by: Caller | None = None) -> Rotation:
    """Seal a database's secrets by the newest key, which is made if there is no file. Raises SecretsUnreadable.

    `by`: the person who does it, for the audit.
    """
    if key_file is not None:
        make_key_file(key_file)
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as connection:
            return await rotate(connection, Vault(key_file), by=by)
    finally:
        await database.close()


async def _say_what_secrets_lack(dsn: str, key_file: Path | None) -> None:
    """Log if secrets are in plain text, or sealed by keys that the file lacks."""
    database = Database(dsn, pool_size=1)
    try:
        async with database.connection() as connection:
            state = await secrets_state(connection, Vault(key_file))
    finally:
        await database.close()
    if state.plain_fault is not None:
        log.warning("secrets_in_plain_text", rows=state.plain, todo=ROTATE)
    for key, columns in state.lacking.items():
        log.error("secrets_unreadable", key=key, columns=columns, key_file=str(key_file))


async def _embedded(data_dir: Path) -> EmbeddedPostgres:
    """Start the embedded server; if that is interrupted, stop it again rather than leave it behind."""
    interrupted = threading.Event()

    def start() -> EmbeddedPostgres:
        server = EmbeddedPostgres.start(data_dir)
        if interrupted.is_set():
            server.stop()
        return server

    try:
        return await asyncio.to_thread(start)
    except asyncio.CancelledError:
        # A thread can't be cancelled: it ends by itself, and the process waits for it.
        interrupted.set()
        raise


async def _watch(server: EmbeddedPostgres, stopping: asyncio.Event) -> None:
    """Start the embedded server again when it has died; the lanes and the pool reconnect by themselves."""
    while not stopping.is_set():
        await rest(WATCH_EVERY_S, stopping, None)
        if stopping.is_set() or server.alive():
            continue
        log.warning("embedded_postgres_died")
        try:
            await asyncio.to_thread(server.restart)
            log.info("embedded_postgres_restarted")
        except Exception as error:
            log.error("embedded_postgres_not_restarted", error=str(error))


def say_what_is_opened(settings: Settings) -> None:
    """Log it if callbacks may reach this machine's own ports only because nothing else was set."""
    if settings.embedded and settings.allow_networks is None:
        log.info(
            "callbacks_may_go_to_loopback",
            networks=",".join(settings.opened_networks),
            because="the Postgres is the embedded one, and HALFNOTE_ALLOW_NETWORKS is not set",
        )


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Runtime]:
    """Yield a running service and drain it at the end: loops finish their step, leases are released, lanes flush."""
    say_what_is_opened(settings)
    async with AsyncExitStack() as stack:
        dsn = await stack.enter_async_context(database_url(settings))
        runtime = await assemble(settings, dsn, stack)
        stopping = asyncio.Event()
        say_who_is_let_in(runtime)
        loops = all_loops(runtime)
        turning = [asyncio.create_task(run(loop, runtime, stopping), name=loop.name) for loop in loops]
        spare_the_collector()
        ends_at: list[float] = []

        def begin() -> None:
            runtime.stopping = runtime.refusing_halves = True
            stopping.set()
            ends_at.append(monotonic() + settings.drain_s)
            # Before the web server cuts off its requests: they are answered, and told what is known.
            asyncio.get_running_loop().call_later(settings.drain_s * GIVES_UP_AFTER, runtime.lanes.give_up)

        with heard(begin):
            try:
                yield runtime
            finally:
                begin()
                await _drain(turning, loops, max(LEAST_DRAIN_S, ends_at[0] - monotonic()))


def spare_the_collector() -> None:
    """Keep what was made at start out of every later garbage collection, and let the youngest generation grow.

    A request leaves a few hundred short-lived objects; by default each 700th allocation starts a collection.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)


async def assemble(settings: Settings, dsn: str, stack: AsyncExitStack) -> Runtime:
    """Make the parts of one process over a migrated database; `stack` closes them in turn."""
    database = Database(dsn, pool_size=settings.pool_size)
    stack.push_async_callback(database.close)
    clock = Clock()
    async with database.connection() as connection:
        await clock.measure(connection)
    metrics = Metrics()
    limits = LaneLimits(
        settings.batch_max, settings.queue_max, settings.linger_s, settings.flush_timeout_s, settings.poll_s
    )
    wake_ups = WakeUps(database)
    stack.push_async_callback(wake_ups.close)
    tracing = open_tracing(settings)
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    lanes = Lanes(database, clock, metrics, limits, wake_ups.published, tracing)
    stack.push_async_callback(lanes.close)
    dialling = Dialling.of(settings)
    checks_http = await stack.enter_async_context(callback_client(dialling))
    deliveries_http = await stack.enter_async_context(callback_client(dialling))
    runtime = Runtime(
        settings=settings,
        database=database,
        clock=clock,
        metrics=metrics,
        lanes=lanes,
        door=Door(settings),
        dialling=dialling,
        vault=Vault(settings.key_file),
        gate=Gate(settings, clock),
        load=Load(settings),
        checks_http=checks_http,
        deliveries_http=deliveries_http,
        wake_ups=wake_ups,
        tracing=tracing,
        refusing_halves=settings.accept == "ends",
    )
    stack.push_async_callback(runtime.found.close)
    stack.push_async_callback(runtime.versions.close)
    # Before the first request: until keys are read every one of them is unknown.
    await follow(runtime, clock.now())
    return runtime


def say_who_is_let_in(runtime: Runtime) -> None:
    """Log that auth is off, or that nobody could make a key over HTTP."""
    if runtime.gate.off:
        log.warning(
            "auth_off",
            what="whoever reaches this port on this machine may do everything",
            change="HALFNOTE_AUTH=keys, docs/keys.md",
        )
    elif not runtime.gate.has_admin:
        log.warning("no_admin_key", change="halfnote keys create --role admin, or HALFNOTE_ADMIN_KEY_FILE")


def open_tracing(settings: Settings) -> "Tracing | None":
    """Return what makes spans, if they are to be exported; only then OpenTelemetry is imported."""
    if settings.otlp_endpoint is None:
        return None
    from app.tracing import Tracing

    return Tracing(settings.otlp_endpoint, settings.trace_ratio)


async def _drain(turning: list[asyncio.Task[None]], loops: list[Loop], within_s: float) -> None:
    if not turning:
        return
    _, late = await asyncio.wait(turning, timeout=within_s)
    for loop in late:
        log.warning("drain_cut_short", loop=loop.get_name())
        loop.cancel()
    await asyncio.gather(*turning, return_exceptions=True)
