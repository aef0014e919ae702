"""RocketMQ 5.5.0 itself, from Maven: name server, broker and proxy, with topics and groups as a test wants them."""

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from app.rocketmq.remoting.frames import RemotingFrame
from bench.peers.rocketmq import OPENED, RocketServers, java, quiet_port, rocketmq_servers
from bench.peers.slices import listening, server
from tests.support.remoting import RemotingPeer
from tests.support.requirements import absent
from tests.support.rocketmq_clients import CACHE

JARS = CACHE / "rocketmq-servers-5.5.0"
MEMORY = ("-Xms512m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m")
SETTINGS = {
    "autoCreateTopicEnable": "false",
    "enableMixedMessageType": "true",
    "transactionTimeOut": "3000",
    "transactionCheckInterval": "2000",
    "transactionCheckMax": "100",
    # Of the remoting consumers' retries, which begin with the third level.
    "messageDelayLevel": "1s 2s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s",
    # A broker of a busy machine refuses requests that waited 0.2 s, writes that took 1 s, and flushes that took 5 s.
    # The sender of a one-way message does not learn it.
    "waitTimeMillsInSendQueue": "60000",
    "osPageCacheBusyTimeOutMills": "60000",
    "syncFlushTimeout": "60000",
    "mappedFileSizeCommitLog": str(64 * 1024 * 1024),
    "mappedFileSizeConsumeQueue": "600000",
}
# Numbers of requests that an operator's tool sends.
UPDATE_TOPIC, UPDATE_GROUP, MAX_OFFSET = 17, 200, 30
GET_ROUTE = 105
WITHIN_S = 60.0
CLUSTER = "DefaultCluster"


class RocketMq:
    """Running servers: where clients connect, and what an operator does."""

    def __init__(self, servers: RocketServers, proxy_port: int, topic_type: str) -> None:
        self.grpc, self.names = f"127.0.0.1:{proxy_port}", f"127.0.0.1:{servers.names_port}"
        self.broker_port, self._topic_type = servers.broker_port, topic_type

    async def add_topic(self, name: str) -> None:
        """Make a topic."""
        fields = {"topic": name, "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
        fields |= {"topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
        answer = await self._ask(UPDATE_TOPIC, {**fields, "attributes": f"+message.type={self._topic_type}"})
        assert answer.code == 0, answer.remark

    async def add_group(self, name: str, *, retries: int = 16, ordered: bool = False) -> None:
        """Make a consumer group."""
        config = {"groupName": name, "retryMaxTimes": retries, "consumeMessageOrderly": ordered}
        answer = await self._ask(UPDATE_GROUP, {}, json.dumps(config).encode())
        assert answer.code == 0, answer.remark

    async def dead_letters(self, group: str, wanted: int) -> int:
        """Return how many dead letters a group has; wait a while for as many as are wanted."""
        found, until = 0, time.monotonic() + WITHIN_S
        while found < wanted and time.monotonic() < until:
            answer = await self._ask(MAX_OFFSET, {"topic": f"%DLQ%{group}", "queueId": 0})
            found = int(answer.fields.get("offset", 0))
            await asyncio.sleep(0.2)
        return found

    async def _ask(self, code: int, fields: dict[str, Any], body: bytes = b"") -> RemotingFrame:
        # The broker ends a connection without heartbeats.
        peer = await RemotingPeer.connect(self.broker_port)
        try:
            return await peer.call(code, fields, body)
        finally:
            await peer.close()


async def until_registered(names_port: int) -> None:
    """Wait until the broker is known to the name server, which can be seconds after it listens.

    A proxy that starts earlier finds no broker for its own topic, and ends.
    """
    peer = await RemotingPeer.connect(names_port)
    try:
        async with asyncio.timeout(WITHIN_S):
            # A broker has a topic with the name of its cluster.
            while (await peer.call(GET_ROUTE, {"topic": CLUSTER})).code != 0:
                await asyncio.sleep(0.1)
    finally:
        await peer.close()


@asynccontextmanager
async def rocketmq_of(place: Path, topic_type: str) -> AsyncIterator[RocketMq]:
    """Run RocketMQ with its files in the directory `place`. Skips without its jars.

    `topic_type`: of each topic. MIXED is for messages of each type, but RocketMQ's proxy asks only the producers of
    topics of the type TRANSACTION, so with that type it does not check the types of messages.
    """
    if not list(JARS.glob("rocketmq-proxy-*.jar")) or shutil.which("java") is None:
        absent("needs RocketMQ 5.5.0: a JDK, and make test-deps", "DEPS")
    classes = f"{JARS}/*"
    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(rocketmq_servers(place, classes, SETTINGS, MEMORY))
        await until_registered(servers.names_port)
        port = quiet_port()
        configuration = {
            "rocketMQClusterName": CLUSTER,
            "namesrvAddr": f"127.0.0.1:{servers.names_port}",
            "proxyMode": "CLUSTER",
            "grpcServerPort": port,
            "remotingListenPort": quiet_port(),
            "localServeAddr": "127.0.0.1",
            "enableTopicMessageTypeCheck": topic_type == "MIXED",
            # It tells the broker by its heartbeats which topics have a producer that can be asked.
            "transactionHeartbeatPeriodSecond": 1,
        }
        (place / "proxy.json").write_text(json.dumps(configuration))
        command = java(place, "-Xmx384m", *OPENED, "-cp", classes, "org.apache.rocketmq.proxy.ProxyStartup")
        log = place / "proxy.log"
        proxy = await stack.enter_async_context(server(log, *command, "-pc", str(place / "proxy.json")))
        await listening(port, proxy, log)
        yield RocketMq(servers, port, topic_type)
