"""RocketMQ: a name server, a broker that flushes before it answers, and the Java client in the driver."""

import random
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.payload import half_body, message_of
from bench.peers import parts
from bench.peers.slices import Peer, cpu_of, driving, listening, server

# The broker's heap and direct memory; its own scripts ask for 8 GB, which few machines of a test have.
BROKER_MEMORY = ("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=2g")
DRIVER_MEMORY = ("-Xms512m", "-Xmx512m")
OPENED = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)
PORTS = range(20_000, 32_000)
TUNED = {"endTransactionThreadPoolNums": "64"}


@dataclass(frozen=True, slots=True)
class RocketServers:
    """A name server and a broker that run."""

    names_port: int
    broker_port: int
    processes: list[psutil.Process]


@asynccontextmanager
async def rocketmq(name: str, place: Path, settings: Mapping[str, str], *, consumers: int = 1) -> AsyncIterator[Peer]:
    """Run RocketMQ with its files in the directory `place`. `settings` are added to the broker's."""
    programs = await parts.rocketmq()
    classes = f"{programs}/classes:{programs}/lib/*"
    parts.made(place)
    body = place / "body"
    body.write_bytes(message_of(half_body()))
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(rocketmq_servers(place, classes, settings))
        command = java(place, *DRIVER_MEMORY, "-cp", classes, "Driver", f"127.0.0.1:{servers.names_port}")
        driver = await stack.enter_async_context(
            driving(name, place / "driver.log", *command, str(body), str(consumers))
        )
        yield Peer(
            name,
            driver,
            service_cpu_s=lambda: cpu_of(servers.processes),
            database_cpu_s=lambda: 0.0,
            client_cpu_s=lambda: cpu_of([driver.process]),
            halted=lambda: [*servers.processes, driver.process],
        )


@asynccontextmanager
async def rocketmq_servers(
    place: Path, classes: str, settings: Mapping[str, str], memory: Sequence[str] = BROKER_MEMORY
) -> AsyncIterator[RocketServers]:
    """Run a name server and a broker until the block ends. `classes`: Java's class path; `memory`: of the broker."""
    async with AsyncExitStack() as stack:
        names_port, broker_port = quiet_port(), quiet_port()
        (place / "names.conf").write_text(f"listenPort={names_port}\nbindAddress=127.0.0.1\n")
        log = place / "names.log"
        command = java(place, "-Xmx256m", "-cp", classes, "org.apache.rocketmq.namesrv.NamesrvStartup")
        names = await stack.enter_async_context(server(log, *command, "-c", str(place / "names.conf")))
        await listening(names_port, names, log)
        (place / "broker.conf").write_text(broker_conf(place, names_port, broker_port, settings))
        log = place / "broker.log"
        command = java(place, *memory, *OPENED, "-cp", classes, "org.apache.rocketmq.broker.BrokerStartup")
        broker = await stack.enter_async_context(server(log, *command, "-c", str(place / "broker.conf")))
        await listening(broker_port, broker, log)
        yield RocketServers(names_port, broker_port, [names, broker])


def java(place: Path, *options: str) -> list[str]:
    """Return a command that runs Java with RocketMQ's files in the directory `place`."""
    return ["java", f"-Drocketmq.home.dir={place}", f"-Duser.home={place}", *options]


def broker_conf(place: Path, names_port: int, port: int, settings: Mapping[str, str]) -> str:
    """Return the broker's configuration: a message is on disk before its answer, and there is no replica."""
    lines = {
        "brokerName": "bench",
        "brokerId": "0",
        "brokerRole": "ASYNC_MASTER",
        "flushDiskType": "SYNC_FLUSH",
        "brokerIP1": "127.0.0.1",
        "bindAddress": "127.0.0.1",
        "listenPort": str(port),
        "namesrvAddr": f"127.0.0.1:{names_port}",
        "storePathRootDir": str(place / "store"),
        "storePathCommitLog": str(place / "store" / "commitlog"),
        "autoCreateTopicEnable": "true",
        "diskMaxUsedSpaceRatio": "98",
        **settings,
    }
    return "".join(f"{name}={value}\n" for name, value in lines.items())


def quiet_port() -> int:
    """Return a port that is free, as are those two below and one above it, on which a broker listens too.

    It is below the ports of outgoing connections, because a broker binds its second port some seconds after the first.
    """
    while True:
        port = random.choice(PORTS)
        if all(is_free(other) for other in range(port - 2, port + 2)):
            return port


def is_free(port: int) -> bool:
    """Return whether nothing listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
