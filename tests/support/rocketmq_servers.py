"""RocketMQ 5.5.0 itself, from Maven: name server, broker and proxy, set up for the drivers of its clients."""

import asyncio
import json
import random
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.requirements import absent
from tests.support.rocketmq_clients import CACHE

JARS = CACHE / "rocketmq-servers-5.5.0"
WITHIN_S = 120.0
OPENED = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
)


@dataclass(frozen=True)
class RocketMqServers:
    """Where clients connect: those for gRPC, and those for remoting."""

    grpc: str
    names: str


@asynccontextmanager
async def rocketmq_servers(place: Path, topic: str) -> AsyncIterator[RocketMqServers]:
    """Run RocketMQ with one topic. Checks and retries come after a second, as the tests set them in Halfnote."""
    if not list(JARS.glob("rocketmq-proxy-*.jar")) or shutil.which("java") is None:
        absent("needs RocketMQ 5.5.0: a JDK, and make test-deps", "DEPS")
    names, broker, proxy, remoting = (free_ports() for _ in range(4))
    (place / "names.conf").write_text(f"listenPort={names}\nbindAddress=127.0.0.1\n")
    (place / "broker.conf").write_text(
        f"brokerName=broker\nbrokerId=0\nbrokerRole=ASYNC_MASTER\nflushDiskType=SYNC_FLUSH\nbrokerIP1=127.0.0.1\n"
        f"bindAddress=127.0.0.1\nlistenPort={broker}\nnamesrvAddr=127.0.0.1:{names}\nstorePathRootDir={place}/store\n"
        f"storePathCommitLog={place}/store/commitlog\nautoCreateTopicEnable=false\ndiskMaxUsedSpaceRatio=98\n"
        f"transactionTimeOut=1000\ntransactionCheckInterval=1000\nmessageDelayLevel=1s 2s{' 1s' * 16}\n"
        "mappedFileSizeCommitLog=67108864\nmappedFileSizeConsumeQueue=600000\n"
    )
    # The drivers send messages of each type to one topic.
    (place / "proxy.json").write_text(
        json.dumps(
            {
                "rocketMQClusterName": "DefaultCluster",
                "namesrvAddr": f"127.0.0.1:{names}",
                "proxyMode": "CLUSTER",
                "grpcServerPort": proxy,
                "remotingListenPort": remoting,
                "enableTopicMessageTypeCheck": False,
                "localServeAddr": "127.0.0.1",
            }
        )
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            running(place, names, "-Xmx192m", "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", f"{place}/names.conf")
        )
        await stack.enter_async_context(
            running(
                place,
                broker,
                "-Xms512m",
                "-Xmx512m",
                "-XX:MaxDirectMemorySize=512m",
                *OPENED,
                "org.apache.rocketmq.broker.BrokerStartup",
                "-c",
                f"{place}/broker.conf",
            )
        )
        administer(place, "updateTopic", "-b", f"127.0.0.1:{broker}", "-t", topic, "-r", "4", "-w", "4")
        await stack.enter_async_context(
            running(
                place,
                proxy,
                "-Xmx384m",
                *OPENED,
                "org.apache.rocketmq.proxy.ProxyStartup",
                "-pc",
                f"{place}/proxy.json",
            )
        )
        yield RocketMqServers(f"127.0.0.1:{proxy}", f"127.0.0.1:{names}")


def java(place: Path, *arguments: str) -> list[str]:
    """Return a command that runs a class of RocketMQ's, with its files in `place`."""
    home = [f"-Drocketmq.home.dir={place}", f"-DROCKETMQ_HOME={place}", f"-Duser.home={place}"]
    return ["java", *home, "-cp", f"{JARS}/*", *arguments]


def administer(place: Path, *arguments: str) -> None:
    """Run a command of mqadmin."""
    command = java(place, "-Xmx192m", "org.apache.rocketmq.tools.command.MQAdminStartup", *arguments)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, env=environment(place))
    assert "success" in ran.stdout, f"{ran.stdout}\n{ran.stderr}"


@asynccontextmanager
async def running(place: Path, port: int, *arguments: str) -> AsyncIterator[None]:
    """Run a server until it listens, and end it afterwards."""
    log = place / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            java(place, *arguments), stdout=output, stderr=output, start_new_session=True, env=environment(place)
        )
    try:
        async with asyncio.timeout(WITHIN_S):
            while not listens(port):
                assert process.poll() is None, log.read_text()[-3000:]
                await asyncio.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def environment(place: Path) -> dict[str, str]:
    """Return an environment in which nothing of another RocketMQ is named."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(place), "ROCKETMQ_HOME": str(place)}


def listens(port: int) -> bool:
    """Return whether something listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports() -> int:
    """Return a port that is free, as are those beside it, on which a broker listens too.

    It is below the ports of outgoing connections, because a broker binds its second port some seconds after the first.
    """
    while True:
        port = random.choice(range(20_000, 32_000))
        if not any(listens(other) for other in range(port - 2, port + 2)):
            return port
