"""A remoting client that says exactly what a test wants, and the gateway's remoting part in a test's own loop."""

import asyncio
import hmac
import json
import ssl
import struct
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from uuid import uuid4

import httpx

from app.rocketmq.buffers import Buffers
from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.halfnote_api import HalfnoteApi
from app.rocketmq.remoting.codes import RequestCode
from app.rocketmq.remoting.frames import JSON_HEADER, RemotingFrame, decode, encode
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from app.rocketmq.remoting.store_format import properties_text, read_properties
from app.rocketmq.subscriptions import Subscriptions
from tests.support.gateway import LIMITS

ONEWAY = 2
WITHIN_S = 30.0
_message = struct.Struct(">iiiiiqqiq4siq4siiq")
_numbers = count(1)


@dataclass(frozen=True)
class ReadMessage:
    """A message as RocketMQ's decoder reads it."""

    topic: str
    body: bytes
    properties: dict[str, str]
    queue_id: int
    queue_offset: int
    position: int
    reconsume_times: int

    @property
    def unique_key(self) -> str:
        """The client's own id of the message."""
        return self.properties["UNIQ_KEY"]


def read_messages(content: bytes) -> list[ReadMessage]:
    """Read messages of the commit log's format."""
    messages, at = [], 0
    while at < len(content):
        fields = _message.unpack_from(content, at)
        size, magic, _, queue_id, _, queue_offset, position = fields[:7]
        assert magic & 0xFFFFFFFF == 0xDAA320A7
        start = at + _message.size + 4
        end = start + int.from_bytes(content[start - 4 : start], "big")
        topic_end = end + 1 + content[end]
        properties_end = topic_end + 2 + int.from_bytes(content[topic_end : topic_end + 2], "big")
        assert properties_end == at + size
        messages.append(
            ReadMessage(
                content[end + 1 : topic_end].decode(),
                content[start:end],
                read_properties(content[topic_end + 2 : properties_end].decode()),
                queue_id,
                queue_offset,
                position,
                fields[14],
            )
        )
        at = properties_end
    return messages


class RemotingPeer:
    """One connection, with requests that the gateway sends in `asked`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, access: tuple[str, str] | None
    ) -> None:
        self._reader, self.writer, self._access = reader, writer, access
        self.client_id = f"test@{uuid4()}"
        self.header = JSON_HEADER
        # Where queue 0 begins. Offsets of pulls and commits are given without it.
        self.origin = 0
        self.asked: asyncio.Queue[RemotingFrame] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[RemotingFrame]] = {}
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls, port: int, access: tuple[str, str] | None = None, tls: ssl.SSLContext | None = None
    ) -> "RemotingPeer":
        """Connect. `access`: an access key and its secret."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=tls), access)

    async def close(self) -> None:
        """End the connection."""
        self.writer.transport.abort()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def ended(self) -> None:
        """Wait until the gateway has ended the connection."""
        async with asyncio.timeout(WITHIN_S):
            await asyncio.wait([self._reading])

    def write(self, code: int, fields: dict[str, Any] | None = None, body: bytes = b"", flag: int = 0) -> int:
        """Send a request; return its number."""
        named = {name: str(value) for name, value in (fields or {}).items()}
        frame = RemotingFrame(code, next(_numbers), flag, None, named, body, self.header)
        self.writer.write(encode(self._signed(frame)))
        return frame.opaque

    async def call(self, code: int, fields: dict[str, Any] | None = None, body: bytes = b"") -> RemotingFrame:
        """Send a request and return its answer."""
        future: asyncio.Future[RemotingFrame] = asyncio.get_running_loop().create_future()
        self._answers[self.write(code, fields, body)] = future
        async with asyncio.timeout(WITHIN_S):
            return await future

    async def heartbeat(
        self,
        *,
        producers: tuple[str, ...] = (),
        consumers: dict[str, str] | None = None,
        topic: str = "order",
        **more: Any,
    ) -> RemotingFrame:
        """Say which groups this client has; `consumers` are groups with their filter expressions."""
        subscriptions = [
            {
                "groupName": group,
                "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "subscriptionDataSet": [{"topic": topic, "subString": expression, "expressionType": "TAG"}],
                **more,
            }
            for group, expression in (consumers or {}).items()
        ]
        content = {
            "clientID": self.client_id,
            "producerDataSet": [{"groupName": group} for group in producers],
            "consumerDataSet": subscriptions,
        }
        return await self.call(RequestCode.HEART_BEAT, body=json.dumps(content).encode())

    async def send(self, body: bytes, group: str = "shop", topic: str = "order", **fields: Any) -> RemotingFrame:
        """Send a message, by the request with letters. `properties` may be given."""
        properties = {"UNIQ_KEY": uuid4().hex.upper(), **fields.pop("properties", {})}
        letters = {"a": group, "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "h": 0, "j": 0, "m": "false"}
        letters["g"] = int(time.time() * 1000)
        return await self.call(
            fields.pop("code", RequestCode.SEND_MESSAGE_V2),
            {**letters, "i": properties_text(properties), **fields},
            body,
        )

    async def pull(self, offset: int, group: str = "points", topic: str = "order", **fields: Any) -> RemotingFrame:
        """Pull from queue 0, without waiting unless `suspendTimeoutMillis` is given."""
        asked = {"consumerGroup": group, "topic": topic, "queueId": 0, "queueOffset": self.origin + offset}
        asked |= {"maxMsgNums": 32, "sysFlag": 3, "suspendTimeoutMillis": 0, "subVersion": 1, **fields}
        asked["commitOffset"] = self.origin + fields.get("commitOffset", 0)
        return await self.call(RequestCode.PULL_MESSAGE, asked)

    async def commit(self, offset: int, group: str = "points", topic: str = "order") -> None:
        """Commit an offset of queue 0."""
        fields = {"consumerGroup": group, "topic": topic, "queueId": 0, "commitOffset": self.origin + offset}
        assert (await self.call(RequestCode.UPDATE_CONSUMER_OFFSET, fields)).code == 0

    def _signed(self, frame: RemotingFrame) -> RemotingFrame:
        if self._access is None:
            return frame
        key, secret = self._access
        fields = {**frame.fields, "AccessKey": key}
        content = "".join(value for _, value in sorted(fields.items())).encode() + frame.body
        signature = b64encode(hmac.new(secret.encode(), content, "sha1").digest()).decode()
        return replace(frame, fields={**fields, "Signature": signature})

    async def _read(self) -> None:
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(4), "big")
                frame = decode(await self._reader.readexactly(length))
                if frame.is_answer:
                    self._answers.pop(frame.opaque).set_result(frame)
                else:
                    self.asked.put_nowait(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            return


@asynccontextmanager
async def remoting_over(
    transport: httpx.AsyncBaseTransport | None,
    credentials: Credentials | None = None,
    url: str = "http://localhost",
    tls: ssl.SSLContext | None = None,
    addresses: Sequence[str] = (),
    **limits: Any,
) -> AsyncIterator[tuple[RemotingGateway, int]]:
    """Run the gateway's remoting part in this loop; yield it, and its port. `limits`: other than LIMITS.

    `addresses`: that clients learn.
    """
    metrics = GatewayMetrics()
    used = replace(LIMITS, **limits)
    api = HalfnoteApi(url, True, metrics, Buffers(used.buffered_bytes), transport=transport)
    own = credentials or Credentials(None, ApiKeys(None, None))
    gateway = RemotingGateway(api, Subscriptions(api), own, used, metrics, addresses)
    port = await gateway.start("127.0.0.1", 0, tls)
    try:
        yield gateway, port
    finally:
        await gateway.stop()
        await api.aclose()
