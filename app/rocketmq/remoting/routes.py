"""Routes, which the name server gives: every topic has queues here, or at each of the gateways that are named."""

import json
from collections.abc import Sequence
from typing import Any

from app.rocketmq.remoting.codes import RemotingRefused, ResultCode
from app.rocketmq.remoting.frames import RemotingFrame
from app.rocketmq.remoting.names import RETRY, is_system, topic_of
from app.rocketmq.remoting.requests import RemotingCall

CLUSTER = "halfnote"
# RocketMQ's default for new topics.
QUEUES = 4
_READ_AND_WRITE = 6


class Routes:
    """Answers where topics are. `addresses`: of the gateways; none: the address by which the client came."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(addresses)

    async def route(self, call: RemotingCall) -> RemotingFrame:
        """Return the queues of a topic. Raises CallRefused, RemotingRefused."""
        topic = call.text("topic")
        if topic.startswith(RETRY):
            # Messages come again by their own topic. Clients want a queue to be there.
            return self._answer(call, 1)
        if is_system(topic):
            raise RemotingRefused(ResultCode.TOPIC_NOT_EXIST, f"Halfnote has no topic `{topic}`.")
        topic_of(topic)
        return self._answer(call, QUEUES)

    def _answer(self, call: RemotingCall, queues: int) -> RemotingFrame:
        host, port = call.connection.host
        brokers = (
            {f"{CLUSTER}@{address}": address for address in self._addresses}
            if self._addresses
            else {CLUSTER: f"{host}:{port}"}
        )
        content: dict[str, Any] = {
            "brokerDatas": [
                {"brokerAddrs": {"0": address}, "brokerName": name, "cluster": CLUSTER}
                for name, address in brokers.items()
            ],
            "filterServerTable": {},
            "queueDatas": [
                {
                    "brokerName": name,
                    "perm": _READ_AND_WRITE,
                    "readQueueNums": queues,
                    "topicSysFlag": 0,
                    "topicSynFlag": 0,
                    "writeQueueNums": queues,
                }
                for name in brokers
            ],
        }
        return call.frame.answered(ResultCode.SUCCESS, body=json.dumps(content).encode())
