"""What `halfnote serve` and `migrate` run: one process or several over one prepared database."""

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from math import ceil
from types import FrameType

import asyncpg
import uvicorn
from anyio.from_thread import start_blocking_portal
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from app.cli.person import person
from app.cli.refusal import Refusal
from app.cli.serve import WRONG_USAGE
from app.config import BadKeyFile, Settings
from app.database import UnusableDatabase, refuse_unusable
from app.embedded import EmbeddedPostgres, EmbeddedPostgresError
from app.migrate import migrate
from app.start import database_url, say_what_is_opened
from app.telemetry import set_up_logs

# Longer than the usual client keeps an idle connection, so that it is the client who closes it and never a race.
KEEP_ALIVE_S = 75
BACKLOG = 2048
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
# What shells report of a command that Ctrl-C ended.
INTERRUPTED = 130


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises Refusal."""
    set_up_logs()
    refuse_without_exporter(settings)
    say_what_is_opened(settings)
    signal.signal(signal.SIGTERM, _leave)
    listener = listen(settings)
    try:
        with refusals():
            settings.given_admin_key()
        with prepared_database(settings) as url:
            # The app reads its settings from the environment, in this process or in its children.
            os.environ["HALFNOTE_DATABASE_URL"] = url
            os.environ["HALFNOTE_SECRETS_KEY_FILE"] = str(settings.key_file)
            os.environ["HALFNOTE_ALLOW_NETWORKS"] = ",".join(settings.opened_networks)
            run(settings, listener)
    except KeyboardInterrupt:
        return


def refuse_without_exporter(settings: Settings) -> None:
    """Raise Refusal if spans are to be exported and nothing is installed that could.

    Not a matter of the settings themselves: the nightly programs have the same, and export nothing.
    """
    if settings.otlp_endpoint is None:
        return
    try:
        missing = find_spec(EXPORTER) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise Refusal(
            "HALFNOTE_OTLP_ENDPOINT: traces need OpenTelemetry: pip install 'halfnote-server[otel]'", code=WRONG_USAGE
        )


def migrate_database(settings: Settings) -> None:
    """Bring the database to this version's schema. Raises Refusal."""
    set_up_logs()

    async def migrated() -> None:
        async with _server(settings) as url:
            await migrate(url, days_ahead=settings.days_ahead, by=person())

    with refusals():
        asyncio.run(migrated())


def listen(settings: Settings) -> socket.socket:
    """Return a bound socket; connections are refused until a server listens on it. Raises Refusal."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise Refusal(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}. "
            "Stop what listens there, or choose another by --port or HALFNOTE_PORT."
        ) from None
    listener.set_inheritable(True)
    return listener


@contextmanager
def prepared_database(settings: Settings) -> Iterator[str]:
    """Yield where the database is, kept by a thread of its own while processes serve over it. Raises Refusal."""
    with start_blocking_portal() as thread, ExitStack() as stack:
        with refusals():
            url = stack.enter_context(thread.wrap_async_context_manager(database_url(settings)))
        yield url


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what is wrong with a database into a Refusal."""
    try:
        yield
    except (UnusableDatabase, EmbeddedPostgresError, BadKeyFile) as error:
        raise Refusal(str(error)) from None
    except (OSError, TimeoutError, asyncpg.PostgresError) as error:
        raise Refusal(
            f"The database cannot be used: {error or type(error).__name__}. Check HALFNOTE_DATABASE_URL."
        ) from None


@asynccontextmanager
async def _server(settings: Settings) -> AsyncIterator[str]:
    """Yield a server to migrate: the user's own, checked, or the embedded one, started for it."""
    if settings.database_url:
        await refuse_unusable(settings.database_url)
        yield settings.database_url
        return
    server = await asyncio.to_thread(EmbeddedPostgres.start, settings.data_dir)
    try:
        yield server.url
    finally:
        await asyncio.to_thread(server.stop)


def uvicorn_config(settings: Settings) -> uvicorn.Config:
    """Return how uvicorn serves the app."""
    return uvicorn.Config(
        "app.main:app",
        host=settings.host,
        port=settings.port,
        workers=settings.workers,
        loop="auto",
        http="app.corked:CorkedHttp",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=ceil(settings.drain_s),
    )


def run(settings: Settings, listener: socket.socket) -> None:
    """Serve on the socket, in this process or in `workers` children, until a signal ends it."""
    config = uvicorn_config(settings)
    if settings.workers == 1:
        server = Server(config)
        try:
            server.run([listener])
        except KeyboardInterrupt:
            if not server.force_exit:
                raise
        if server.force_exit:
            raise SystemExit(INTERRUPTED)
        return
    with tempfile.TemporaryDirectory(prefix="halfnote-metrics-") as metrics:
        # Before the children start: the client library chooses its kind of counters when it is imported.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        supervisor = Supervisor(config, sockets=[listener])
        supervisor.run()
        if any(child.exitcode == STARTUP_FAILURE for child in supervisor.processes):
            raise Refusal("The service could not start; the log says why.")


class Server(uvicorn.Server):
    """Uvicorn's server, which says when it is there, and goes quietly."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then greet."""
        await super().startup(sockets)
        greet(self.config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; once a second Ctrl-C asks to drop what is left, its cancellation is not told as a fault."""
        await super().shutdown(sockets)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True


class Supervisor(Multiprocess):
    """Uvicorn's parent of several processes, which says when they are there."""

    def init_processes(self) -> None:
        """Start the children, then greet once all of them listen."""
        super().init_processes()
        if all(child.wait_until_ready(60, self.should_exit) for child in self.processes):
            greet(self.config)


def greet(config: uvicorn.Config) -> None:
    """Print where the service is and what to try."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{config.port}"
    width = len(url) + len("curl /readyz") + 2
    tries = "\n".join(f"  {command.format(url=url):<{width}} {why}" for command, why in TRIES)
    print(f"\nHalfnote is ready on {url}; Ctrl-C stops it. In another terminal:\n\n{tries}\n", flush=True)


TRIES = (
    ("make demo", "order 1030 step by step, and a producer that dies and is rescued"),
    ("README.md", "order 1030 by hand, in five curl calls"),
    ("{url}/docs", "every call, to try in a browser"),
    ("curl {url}/readyz", "is all well?"),
    (".venv/bin/halfnote --help", "the command line"),
)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the command in order: what runs on the way out stops the embedded Postgres."""
    raise SystemExit(0)
