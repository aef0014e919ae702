"""Run `halfnote serve`, as one process or several over one prepared database, and `halfnote migrate`."""

import asyncio
import atexit
import errno
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from types import FrameType
from typing import NoReturn

import structlog
import uvicorn
from anyio.from_thread import start_blocking_portal
from uvicorn.config import STARTUP_FAILURE

from app.cli import INTERRUPTED
from app.cli.errors import WRONG_USAGE, Refusal
from app.cli.leaving import leaving
from app.cli.os_user import person
from app.cli.refusals import refusals
from app.cli.standard_output import discard_output
from app.cli.supervisor import Server, Supervisor
from app.cli.usable_cores import usable_cores
from app.config import BadOidcSecretFile, ProcessRole, Settings
from app.database.connection import refuse_unusable
from app.embedded_postgres import EmbeddedPostgres
from app.lifecycle.database import HOME_VARIABLE, PreparedDatabase, migrate_embedded, prepared_database
from app.lifecycle.signals import hangup_as_sigterm
from app.lifecycle.startup import log_open_networks, server_certificate
from app.migrate import head, migrate
from app.observability.logs import set_up_logs

log = structlog.get_logger(__name__)

BACKLOG = 2048
PLAIN, TLS = "app.server.http_protocol:HttpProtocol", "app.server.tls_protocol:TlsProtocol"
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
NOT_STARTED = "The service could not start; the log says why."
# By how much several API processes give way to the worker beside them where cores are short (docs/decisions/0036).
API_NICENESS = 5


def serve(settings: Settings) -> None:
    """Serve until SIGTERM, Ctrl-C or a hang-up. Raises Refusal."""
    set_up_logs()
    refuse_without_exporter(settings)
    refuse_without_openid(settings)
    log_open_networks(settings)
    with refusals():
        settings.given_admin_key()
        server_certificate(settings)
    signal.signal(signal.SIGTERM, _leave)
    listener = listen(settings)
    try:
        with hangup_as_sigterm(), watched_database(settings) as database:
            # The app reads its settings from the environment, in this process or in its children.
            os.environ["HALFNOTE_DATABASE_URL"] = database.url
            os.environ[HOME_VARIABLE] = "" if database.home is None else str(database.home)
            os.environ["HALFNOTE_SECRETS_KEY_FILE"] = str(settings.key_file)
            os.environ["HALFNOTE_ALLOW_NETWORKS"] = ",".join(settings.opened_networks)
            run(settings, listener)
    except KeyboardInterrupt:
        return


def refuse_without_exporter(settings: Settings) -> None:
    """Raise Refusal if spans are to be exported and OpenTelemetry is not installed.

    The settings do not check this: the nightly programs have the same settings and export nothing.
    """
    if settings.otlp_endpoint is None:
        return
    if not _is_installed(EXPORTER):
        raise Refusal(
            "HALFNOTE_OTLP_ENDPOINT: traces need OpenTelemetry: pip install 'halfnote-server[otel]'", code=WRONG_USAGE
        )


def refuse_without_openid(settings: Settings) -> None:
    """Raise Refusal if people may sign in by OpenID Connect, and Authlib or the client's secret is missing."""
    if settings.oidc_issuer is None:
        return
    if not _is_installed("authlib") or not _is_installed("joserfc"):
        raise Refusal(
            "HALFNOTE_OIDC_ISSUER: OpenID Connect needs Authlib: pip install 'halfnote-server[oidc]'", code=WRONG_USAGE
        )
    try:
        settings.given_oidc_secret()
    except BadOidcSecretFile as error:
        raise Refusal(f"{error}.") from None


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def migrate_database(settings: Settings) -> str:
    """Migrate the database to this version's schema; return what was done, as a sentence. Raises Refusal."""
    set_up_logs()

    async def migrated(url: str) -> str:
        await refuse_unusable(url)
        return await migrate(url, days_ahead=settings.days_ahead, key_file=settings.key_file, by=person())

    # With a server of its own nothing is left to be stopped, and a signal ends the program at once: the revision under
    # way is one database transaction.
    with nullcontext() if settings.database_url else leaving(), refusals():
        if settings.database_url:
            revision = asyncio.run(migrated(settings.database_url))
        else:
            server = EmbeddedPostgres.start(settings.data_dir)
            try:
                revision = asyncio.run(migrate_embedded(server.url, settings, by=person()))
            finally:
                server.stop()
    if revision == head():
        return "The database is at this version's schema."
    return (
        f"The database stays at revision {revision}, later than this version's {head()}.\nIt serves this version too."
    )


def listen(settings: Settings) -> socket.socket:
    """Return a bound socket that refuses connections until a server listens on it. Raises Refusal."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise Refusal(f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}. {_advice(error)}") from None
    listener.set_inheritable(True)
    return listener


def _advice(error: OSError) -> str:
    """Say what to do about an address that cannot be listened on."""
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            "With --host or HALFNOTE_HOST, name an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of "
            "them."
        )
    other = "choose another port with --port or HALFNOTE_PORT."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Ports below 1024 may need a right: {other}"
    return f"Stop the program that listens there, or {other}"


@contextmanager
def watched_database(settings: Settings) -> Iterator[PreparedDatabase]:
    """Yield the database. A thread watches the embedded one while processes serve. Raises Refusal."""
    with start_blocking_portal() as thread, ExitStack() as stack:
        with refusals():
            database = stack.enter_context(thread.wrap_async_context_manager(prepared_database(settings)))
        yield database


def uvicorn_config(settings: Settings) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    return uvicorn.Config(
        "app.main:app",
        host=settings.host,
        port=settings.port,
        loop="auto",
        http=PLAIN if settings.tls_cert is None else TLS,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=ceil(settings.drain_s),
    )


def child_roles(settings: Settings) -> list[ProcessRole]:
    """Return the roles of the child processes that serve; none if this process serves itself."""
    number = settings.workers
    if number == "auto":
        apart = settings.role == "all" and usable_cores() > 1 and sys.platform != "win32" and _has_scratch()
        return ["api", "worker"] if apart else []
    if number == 1:
        return []
    api: list[ProcessRole] = ["api"] * number
    return [*api, "worker"] if settings.role == "all" else [settings.role] * number


def _has_scratch() -> bool:
    """Return whether there is a directory for what several processes share: a container may have none."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return False
    return True


def run(settings: Settings, listener: socket.socket) -> None:
    """Serve on the socket in this process, or in child processes, until a signal ends it."""
    config = uvicorn_config(settings)
    roles = child_roles(settings)
    if not roles:
        server = GreetingServer(config)
        try:
            server.run([listener])
        except KeyboardInterrupt:
            if not server.force_exit:
                raise
        except SystemExit as ended:
            if ended.code != STARTUP_FAILURE:
                raise
            raise Refusal(NOT_STARTED) from None
        if server.force_exit:
            raise SystemExit(INTERRUPTED)
        return
    with tempfile.TemporaryDirectory(prefix="halfnote-") as directory:
        # Before the children start: the Prometheus client chooses its kind of counters at import.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
        niceness = API_NICENESS if roles.count("api") > 1 else 0
        supervisor = Supervisor(config, listener, roles, Path(directory) / "worker.json", niceness)
        end = supervisor.run(lambda: greet(config))
    if end == "not ended":
        exit_without_children()
    if end == "not started":
        raise Refusal(NOT_STARTED)
    if end == "interrupted":
        raise SystemExit(INTERRUPTED)


def exit_without_children() -> NoReturn:
    """End this process with status 1 after what it began is ended in order, but for its child processes.

    Python waits for them at the exit, and one that does not end would keep this process as well.
    """

    def leave_at_once() -> None:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)

    # Called before the functions that were registered earlier, which wait.
    atexit.register(leave_at_once)
    raise SystemExit(1)


class GreetingServer(Server):
    """The server of a single process. It prints a greeting when it listens."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then print the greeting."""
        await super().startup(sockets)
        greet(self.config)


def greet(config: uvicorn.Config) -> None:
    """Print the service's URL and commands to try, if standard output takes them."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"{'https' if config.http == TLS else 'http'}://{host}:{config.port}"
    tries = (*(OF_CHECKOUT if (CHECKOUT / "Makefile").exists() else ()), *TRIES)
    commands = [command.format(url=url, halfnote=_command()) for command, _ in tries]
    width = max(map(len, commands)) + 2
    lines = "\n".join(f"  {command:<{width}} {why}" for command, (_, why) in zip(commands, tries, strict=True))
    try:
        print(f"\nHalfnote is ready on {url}; Ctrl-C stops it. In another terminal:\n\n{lines}\n", flush=True)
    except (OSError, UnicodeError) as error:
        # Its reader is gone, its disk is full, or its encoding lacks a character of the path.
        discard_output()
        log.warning("greeting_not_printed", because=str(error))


# The wheel has neither the Makefile nor the demo.
CHECKOUT = Path(__file__).resolve().parents[2]
OF_CHECKOUT = (
    ("make demo", "order 1030 step by step, and a producer that dies"),
    ("README.md", "order 1030 by hand, in five curl calls"),
)
TRIES = (
    ("{url}/console", "what is in doubt, what was not delivered, and why"),
    ("{url}/docs", "every call, to try in a browser"),
    ("curl {url}/readyz", "is the service ready?"),
    ("{halfnote} --help", "the command line"),
)


def _command() -> str:
    """Return how people call this command: by its name where it is on the PATH, else by its path."""
    here = Path(sys.executable).with_name("halfnote")
    found = shutil.which("halfnote")
    if found is not None and Path(found).resolve() == here.resolve():
        return "halfnote"
    return os.path.relpath(here) if here.is_relative_to(Path.cwd()) else str(here)


def _leave(number: int, frame: FrameType | None) -> None:
    """Raise SystemExit, so that the context managers stop the embedded Postgres."""
    raise SystemExit(0)
