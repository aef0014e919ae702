"""Real servers: RabbitMQ, NATS, Redis, Kafka and MariaDB as processes on free ports of 127.0.0.1, each in a directory.

`rabbitmq()`, `nats()`, `redis()`, `kafka()` and `mariadb()` return the server that the pytest run shares, started
by the first test that needs it; tests use different names on it. `own(kind)` is a server that a test may stop and
start. `make test-deps` installs them. Where one is missing its tests are skipped, or fail with
HALFNOTE_TEST_DEPS=required.
"""

import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support import postgres, shared_servers
from tests.support.requirements import absent

HOST = "127.0.0.1"
KAFKA_JARS = Path.home() / ".cache" / "halfnote" / "kafka-4.3.0"
# The largest message, where the server lets us choose: more than Halfnote's 4 MiB.
RABBITMQ_LARGEST_BYTES = 5 * 1024 * 1024
NATS_LARGEST_BYTES = 5 * 1024 * 1024

_START_WITHIN_S = 90.0
_STOP_WITHIN_S = 30.0
# Below the ports that systems assign to outgoing connections, so that a stopped server's port stays free.
_PORTS = range(20_000, 32_000)
# The shared servers that this worker started: Python warns of processes without a reference.
_running: list["Server"] = []


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a kind of server is run: its programs, its commands for a directory and ports, and when it is ready."""

    programs: tuple[str, ...]
    ports: int
    prepare: Callable[[Path, list[int]], None]
    commands: Callable[[Path, list[int]], list[list[str]]]
    environment: Callable[[Path, list[int]], Mapping[str, str]]
    answers: Callable[[int], bool]
    scheme: str
    settings: str = ""


@dataclass(slots=True)
class Server:
    """One server. A restart changes neither its `port` nor what it stored."""

    kind: str
    directory: Path
    ports: list[int]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def host(self) -> str:
        """The address on which it listens."""
        return HOST

    @property
    def port(self) -> int:
        """The port for clients."""
        return self.ports[0]

    @property
    def url(self) -> str:
        """The `url` of a destination; Kafka's is `host:port`."""
        return f"{RECIPES[self.kind].scheme}{HOST}:{self.port}"

    def start(self) -> None:
        """Start the server and wait until it answers. Raises RuntimeError with the end of its log if it does not."""
        recipe = RECIPES[self.kind]
        environment = {**os.environ, "HOME": str(self.directory), **recipe.environment(self.directory, self.ports)}
        with (self.directory / "log").open("ab") as log:
            for command in recipe.commands(self.directory, self.ports):
                process = subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                self.processes.append(process)
                if os.environ.get(postgres.RUN):
                    shared_servers.keep(Path(os.environ[postgres.RUN]), process.pid)
        deadline = time.monotonic() + _START_WITHIN_S
        while not recipe.answers(self.port):
            if self.processes[-1].poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"{self.kind} did not start: {self.log[-3000:]}")
            time.sleep(0.05)

    def reconfigure(self, lines: str) -> None:
        """Restart it with lines added to its configuration (`nats.conf`, `rabbitmq.conf`, `server.properties`)."""
        self.stop()
        with (self.directory / RECIPES[self.kind].settings).open("a") as settings:
            settings.write(lines)
        self.start()

    def stop(self) -> None:
        """Stop the server as its operators would, and wait until it has ended."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        """End the server at once, as a power cut would."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                shared_servers.end(psutil.Process(process.pid))
            process.wait(_STOP_WITHIN_S)
        self.processes.clear()

    @property
    def log(self) -> str:
        """The log of the server."""
        return (self.directory / "log").read_text(errors="replace")


def rabbitmq() -> Server:
    """The run's RabbitMQ: user guest, password guest, vhost `/`."""
    return _shared("rabbitmq")


def nats() -> Server:
    """The run's nats-server, with JetStream and no accounts."""
    return _shared("nats")


def redis() -> Server:
    """The run's Redis, with an append-only file and no password."""
    return _shared("redis")


def kafka() -> Server:
    """The run's Kafka, one node, without TLS and accounts; topics must be created."""
    return _shared("kafka")


def mariadb() -> Server:
    """The run's MariaDB: user root without a password; each test creates its own database."""
    return _shared("mariadb")


@contextlib.contextmanager
def own(kind: str) -> Iterator[Server]:
    """Yield a started server that only the caller uses."""
    _require(kind)
    directory = Path(tempfile.mkdtemp(prefix=f"halfnote-{kind}-"))
    try:
        server = _started(kind, directory)
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def missing(kind: str) -> str | None:
    """Return why this kind of server cannot be started here, or None."""
    absent = [program for program in RECIPES[kind].programs if not shutil.which(program)]
    if absent:
        return f"{kind} is not installed here ({', '.join(absent)}): make test-deps"
    if kind == "kafka" and not any(KAFKA_JARS.glob("kafka_*.jar")):
        return f"kafka is not installed here ({KAFKA_JARS}): make test-deps"
    return None


def free_ports(count: int) -> list[int]:
    """Return free ports of 127.0.0.1."""
    found: list[int] = []
    while len(found) < count:
        port = random.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found.append(port)
    return found


def _require(kind: str) -> None:
    reason = missing(kind)
    if reason is None:
        return
    absent(reason, "DEPS")


def _shared(kind: str) -> Server:
    _require(kind)
    directory = Path(os.environ[postgres.RUN]) / "brokers" / kind

    def work() -> str:
        directory.mkdir(parents=True)
        server = _started(kind, directory)
        _running.append(server)
        return "\n".join([str(server.directory), *map(str, server.ports)])

    place, *ports = postgres.once(f"broker-{kind}", work).splitlines()
    return Server(kind, Path(place), [int(port) for port in ports])


def _started(kind: str, directory: Path) -> Server:
    """Start a server on free ports; try others if another program took them meanwhile."""
    recipe = RECIPES[kind]
    for remaining in (2, 1, 0):
        place = directory / str(remaining)
        place.mkdir()
        server = Server(kind, place, free_ports(recipe.ports))
        recipe.prepare(place, server.ports)
        try:
            server.start()
        except RuntimeError:
            if not remaining or "in use" not in server.log.lower():
                raise
        else:
            return server
    raise AssertionError("unreachable")


def _ask(port: int, request: bytes, answer: bytes) -> bool:
    """Return whether a server answers a request with bytes that contain `answer`."""
    try:
        with socket.create_connection((HOST, port), timeout=2) as connection:
            connection.sendall(request)
            received = b""
            while answer not in received:
                piece = connection.recv(4096)
                if not piece:
                    return False
                received += piece
            return True
    except OSError:
        return False


# Erlang terms, because parsing the other form, rabbitmq.conf, takes a second; `reconfigure` adds that one.
# The machine's memory is shared with other programs, and a memory alarm would stop publishers.
_RABBITMQ_SETTINGS = """[{{rabbit, [
    {{tcp_listeners, [{{"{host}", {port}}}]}},
    {{max_message_size, {largest}}},
    {{vm_memory_high_watermark, 0.9}},
    {{disk_free_limit, 10000000}},
    {{log, [{{console, [{{enabled, true}}, {{level, info}}]}}]}}
]}}].
"""


def _rabbitmq_prepare(directory: Path, ports: list[int]) -> None:
    settings = _RABBITMQ_SETTINGS.format(host=HOST, port=ports[0], largest=RABBITMQ_LARGEST_BYTES)
    (directory / "advanced.config").write_text(settings)
    (directory / "enabled_plugins").write_text("[].\n")
    for installed in Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"):
        _rabbitmq_without_plugins(installed, directory / "rabbitmq_server")


def _rabbitmq_without_plugins(installed: Path, home: Path) -> None:
    """Create a home of RabbitMQ with the applications that the broker needs, without the 50 plugins and what they need.

    Erlang searches all their directories for each module that it loads: a third of the CPU time of a start.
    """
    shutil.copytree(installed / "sbin", home / "sbin")
    (home / "plugins").mkdir()
    wanted = ["rabbit"]
    for name in wanted:
        for application in (installed / "plugins").glob(f"{name}-[0-9]*"):
            (home / "plugins" / application.name).symlink_to(application)
            about = (application / "ebin" / f"{name}.app").read_text()
            needed = re.search(r"\{applications,\s*\[(.*?)\]", about, re.DOTALL)
            wanted += [one for one in re.findall(r"\w+", needed[1] if needed else "") if one not in wanted]


def _rabbitmq_environment(directory: Path, ports: list[int]) -> Mapping[str, str]:
    return {
        "RABBITMQ_BASE": str(directory),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "no-env-file"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
        "RABBITMQ_NODENAME": f"halfnote-{ports[0]}@localhost",
        "RABBITMQ_DIST_PORT": str(ports[1]),
        # One scheduler thread is enough, and it does not spin when idle.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +S 1:1",
        "ERL_EPMD_ADDRESS": HOST,
        "ERL_EPMD_PORT": str(ports[2]),
    }


def _rabbitmq_program(directory: Path) -> str:
    # Debian's program in the path changes the user; this one runs as the caller.
    without_plugins = directory / "rabbitmq_server" / "sbin" / "rabbitmq-server"
    return str(without_plugins) if without_plugins.exists() else "rabbitmq-server"


def _nats_prepare(directory: Path, ports: list[int]) -> None:
    (directory / "nats.conf").write_text(
        f'listen: "{HOST}:{ports[0]}"\nmax_payload: {NATS_LARGEST_BYTES}\n'
        f'jetstream {{ store_dir: "{directory}/store" }}\n'
    )


def _kafka_prepare(directory: Path, ports: list[int]) -> None:
    settings = directory / "server.properties"
    settings.write_text(
        "process.roles=broker,controller\n"
        "node.id=1\n"
        f"controller.quorum.voters=1@{HOST}:{ports[1]}\n"
        f"listeners=PLAINTEXT://{HOST}:{ports[0]},CONTROLLER://{HOST}:{ports[1]}\n"
        f"advertised.listeners=PLAINTEXT://{HOST}:{ports[0]}\n"
        "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT\n"
        "controller.listener.names=CONTROLLER\n"
        f"log.dirs={directory}/data\n"
        "auto.create.topics.enable=false\n"
        "num.partitions=8\n"
        "offsets.topic.num.partitions=1\n"
        "offsets.topic.replication.factor=1\n"
        "transaction.state.log.replication.factor=1\n"
        "transaction.state.log.min.isr=1\n"
        "group.initial.rebalance.delay.ms=0\n"
    )
    format_it = [*_JAVA, "-cp", f"{KAFKA_JARS}/*", "kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c"]
    subprocess.run([*format_it, str(settings)], check=True, capture_output=True, timeout=60)


def _mariadb_prepare(directory: Path, ports: list[int]) -> None:
    command = ["mariadb-install-db", "--no-defaults", f"--datadir={directory}/data", f"--user={getpass.getuser()}"]
    options = ["--auth-root-authentication-method=normal", "--skip-test-db"]
    # A server that starts removes the temporary tables of all others from a directory that they share.
    own = {**os.environ, "TMPDIR": str(directory)}
    subprocess.run([*command, *options], check=True, capture_output=True, timeout=120, env=own)


def _mariadb_command(directory: Path, ports: list[int]) -> list[str]:
    return [
        "mariadbd",
        "--no-defaults",
        f"--datadir={directory}/data",
        f"--tmpdir={directory}",
        f"--user={getpass.getuser()}",
        f"--bind-address={HOST}",
        f"--port={ports[0]}",
        f"--socket={directory}/socket",
        "--skip-name-resolve",
        # Each probe of readiness counts as a connect error.
        "--max-connect-errors=1000000",
        # The tests' rows are worthless after a power cut.
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-buffer-pool-size=64M",
    ]


_CLUSTER = "aGFsZm5vdGUtdGVzdHMxMA"
# With one processor, Java starts few threads.
_JAVA = ["java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:ActiveProcessorCount=1"]

RECIPES = {
    "mariadb": Recipe(
        programs=("mariadbd", "mariadb-install-db"),
        ports=1,
        prepare=_mariadb_prepare,
        commands=lambda directory, ports: [_mariadb_command(directory, ports)],
        environment=lambda directory, ports: {},
        answers=lambda port: _ask(port, b"", b"MariaDB"),
        scheme="mysql://root@",
    ),
    "rabbitmq": Recipe(
        programs=("rabbitmq-server", "epmd"),
        ports=3,
        prepare=_rabbitmq_prepare,
        # Erlang would start an epmd that outlives it, unless one runs already.
        commands=lambda directory, ports: [
            ["epmd", "-address", HOST, "-port", str(ports[2])],
            [_rabbitmq_program(directory)],
        ],
        environment=_rabbitmq_environment,
        answers=lambda port: _ask(port, b"AMQP\x00\x00\x09\x01", b"RabbitMQ"),
        scheme="amqp://",
        settings="rabbitmq.conf",
    ),
    "nats": Recipe(
        programs=("nats-server",),
        ports=1,
        prepare=_nats_prepare,
        commands=lambda directory, _: [["nats-server", "-c", str(directory / "nats.conf")]],
        environment=lambda *_: {},
        # NATS sends INFO once JetStream is up, whether or not it requires an account or TLS.
        answers=lambda port: _ask(port, b"", b"INFO"),
        scheme="nats://",
        settings="nats.conf",
    ),
    "redis": Recipe(
        programs=("redis-server",),
        ports=1,
        prepare=lambda *_: None,
        commands=lambda directory, ports: [
            ["redis-server", "--bind", HOST, "--port", str(ports[0]), "--appendonly", "yes", "--dir", str(directory)]
        ],
        environment=lambda *_: {},
        answers=lambda port: _ask(port, b"PING\r\n", b"+PONG"),
        scheme="redis://",
    ),
    "kafka": Recipe(
        programs=("java",),
        ports=2,
        prepare=_kafka_prepare,
        commands=lambda directory, _: [
            [*_JAVA, "-cp", f"{KAFKA_JARS}/*", "kafka.Kafka", str(directory / "server.properties")]
        ],
        environment=lambda *_: {},
        # ApiVersions, version 0, correlation 7, by client "": it is answered once the broker accepts requests.
        answers=lambda port: _ask(port, bytes.fromhex("0000000a00120000000000070000"), bytes.fromhex("00000007")),
        scheme="",
        settings="server.properties",
    ),
}
