"""Bad and unusual requests of RocketMQ's two protocols, by name, each as a function that sends it to any server."""

import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from app.rocketmq.protocol import definition_pb2 as definition
from app.rocketmq.protocol import service_pb2 as protocol
from app.rocketmq.protocol.definition_pb2 import Message, Resource
from app.rocketmq.remoting.codes import RequestCode
from tests.support.gateway import RocketClient, codes_of, message_of, receive_of
from tests.support.remoting import RemotingPeer

TOPIC, GROUP = "order", "points"
ASK = Callable[[RocketClient], Awaitable[str]]
DAY_S = 86_400
# A handle and a transaction id of neither server.
FOREIGN = "order-1030"


async def said(rocket: RocketClient, name: str, request: Any) -> str:
    """Return the status of an answer, or the error of gRPC's."""
    try:
        return codes_of([await rocket.call(name, request)])[0]
    except grpc.aio.AioRpcError as error:
        return f"gRPC: {error.code().name}"


def sends(*messages: Message) -> ASK:
    return lambda rocket: said(rocket, "SendMessage", protocol.SendMessageRequest(messages=messages))


def sends_one(body: bytes = b"x", topic: str = TOPIC, **system: Any) -> ASK:
    return lambda rocket: sends(message_of(topic, body, **system))(rocket)


def sends_later(seconds: float) -> ASK:
    async def send(rocket: RocketClient) -> str:
        message = message_of(TOPIC, b"x", message_type=definition.DELAY)
        message.system_properties.delivery_timestamp.FromMilliseconds(round((time.time() + seconds) * 1000))
        return await sends(message)(rocket)

    return send


def sends_recovered_after(seconds: int) -> ASK:
    message = message_of(TOPIC, b"x", message_type=definition.TRANSACTION)
    message.system_properties.orphaned_transaction_recovery_duration.FromSeconds(seconds)
    return sends(message)


def ends(transaction_id: str, resolution: definition.TransactionResolution = definition.COMMIT) -> ASK:
    request = protocol.EndTransactionRequest(
        topic=Resource(name=TOPIC), message_id="m", transaction_id=transaction_id, resolution=resolution
    )
    return lambda rocket: said(rocket, "EndTransaction", request)


def receives(group: str = GROUP, topic: str = TOPIC, sql: str | None = None, **fields: Any) -> ASK:
    async def receive(rocket: RocketClient) -> str:
        request = receive_of(group, topic, **fields)
        if sql is not None:
            request.filter_expression.CopyFrom(definition.FilterExpression(expression=sql, type=definition.SQL))
        try:
            code, _ = await rocket.receive(request)
        except grpc.aio.AioRpcError as error:
            return f"gRPC: {error.code().name}"
        return definition.Code.Name(code)

    return receive


def acknowledges(*handles: str) -> ASK:
    entries = [protocol.AckMessageEntry(message_id="m", receipt_handle=handle) for handle in handles]
    request = protocol.AckMessageRequest(group=Resource(name=GROUP), topic=Resource(name=TOPIC), entries=entries)
    return lambda rocket: said(rocket, "AckMessage", request)


def changes(seconds: int, handle: str = FOREIGN) -> ASK:
    request = protocol.ChangeInvisibleDurationRequest(
        group=Resource(name=GROUP), topic=Resource(name=TOPIC), receipt_handle=handle, message_id="m"
    )
    request.invisible_duration.FromSeconds(seconds)
    return lambda rocket: said(rocket, "ChangeInvisibleDuration", request)


def routes(topic: str, *, named: bool = True, name: str = "QueryRoute") -> ASK:
    more = {"group": Resource(name=GROUP)} if name == "QueryAssignment" else {}
    request = getattr(protocol, f"{name}Request")(topic=Resource(name=topic), **more)
    if named:
        request.endpoints.scheme = definition.IPv4
        request.endpoints.addresses.add(host="127.0.0.1", port=8081)
    return lambda rocket: said(rocket, name, request)


def asks(name: str, **fields: Any) -> ASK:
    """Return a call without more than these fields."""
    return lambda rocket: said(rocket, name, getattr(protocol, f"{name}Request")(**fields))


async def recalls_a_delayed_message(rocket: RocketClient) -> str:
    message = message_of(TOPIC, b"x", message_type=definition.DELAY)
    message.system_properties.delivery_timestamp.FromMilliseconds(round((time.time() + 3600) * 1000))
    sent = await rocket.call("SendMessage", protocol.SendMessageRequest(messages=[message]))
    handle = sent.entries[0].recall_handle
    return await asks("RecallMessage", topic=Resource(name=TOPIC), recall_handle=handle)(rocket)


def without_client(ask: ASK) -> ASK:
    async def asked(rocket: RocketClient) -> str:
        nameless = RocketClient(rocket._channel, **{"x-mq-client-id": ""})
        return await ask(nameless)

    return asked


def digest(kind: definition.DigestType, checksum: str) -> dict[str, Any]:
    return {"body_digest": definition.Digest(type=kind, checksum=checksum)}


MD5 = hashlib.md5(b"x", usedforsecurity=False).hexdigest().upper()
OVER_GRPC: dict[str, ASK] = {
    "send: a message": sends_one(),
    "send: no message": sends(),
    "send: empty body": sends_one(b""),
    "send: body of 5 MiB": sends_one(bytes(5 * 1024 * 1024)),
    "send: two topics in a request": sends(message_of(TOPIC, b"a"), message_of("billing", b"b")),
    "send: topic that does not exist": sends_one(topic="absent"),
    "send: topic with a blank": sends_one(topic="a b"),
    "send: topic of 300 characters": sends_one(topic="t" * 300),
    "send: topic without a name": sends_one(topic=""),
    "send: topic of the system": sends_one(topic="RMQ_SYS_TRANS_HALF_TOPIC"),
    "send: no message id": sends(
        Message(topic=Resource(name=TOPIC), body=b"x", system_properties={"message_type": definition.NORMAL})
    ),
    "send: blank tag": sends_one(tag=" "),
    "send: tag with a bar": sends_one(tag="a|b"),
    "send: tag with a control character": sends_one(tag="a\x01b"),
    "send: blank key": sends_one(keys=[" "]),
    "send: key with a control character": sends_one(keys=["a\x01b"]),
    "send: property named KEYS": sends_one(user_properties={"KEYS": "a"}),
    "send: property with a control character": sends_one(user_properties={"shop": "a\x01b"}),
    "send: 129 properties": sends_one(user_properties={f"p{number}": "v" for number in range(129)}),
    "send: properties of 17 KiB": sends_one(user_properties={"note": "n" * 17 * 1024}),
    "send: properties of 10 KiB": sends_one(user_properties={"note": "n" * 10 * 1024}),
    "send: blank message group": sends_one(message_type=definition.FIFO, message_group=" "),
    "send: message group of 64 bytes": sends_one(message_type=definition.FIFO, message_group="g" * 64),
    "send: right MD5": sends_one(**digest(definition.MD5, MD5)),
    "send: wrong MD5": sends_one(**digest(definition.MD5, "0" * 32)),
    "send: wrong SHA1": sends_one(**digest(definition.SHA1, "0" * 40)),
    "send: wrong CRC32": sends_one(**digest(definition.CRC32, "0" * 8)),
    "send: gzip that is none": sends_one(body_encoding=definition.GZIP),
    "send: delayed by 60 days": sends_later(60 * DAY_S),
    "send: delayed into the past": sends_later(-60),
    "send: recovery after 2 h": sends_recovered_after(7200),
    "end: no transaction id": ends(""),
    "end: foreign transaction id": ends(FOREIGN),
    "end: unknown transaction id": ends("019a9f1c-1030-7b1e-8f00-1030a1030a10"),
    "end: unknown id, no resolution": ends(FOREIGN, definition.TRANSACTION_RESOLUTION_UNSPECIFIED),
    "receive: nothing there": receives(group="nothing"),
    "receive: invisible for 0 s": receives(invisible_s=0),
    "receive: invisible for 1 s": receives(invisible_s=1),
    "receive: invisible for 13 h": receives(invisible_s=13 * 3600),
    "receive: SQL that is none": receives(sql="price >"),
    "receive: SQL with a comparison of numbers": receives(group="numbers", sql="price > 3"),
    "receive: tags without one": receives(group="tags", expression="||"),
    "receive: group with a blank": receives(group="a b"),
    "receive: topic with a blank": receives(topic="a b"),
    "receive: topic that does not exist": receives(topic="absent"),
    "ack: no entry": acknowledges(),
    "ack: no handle": acknowledges(""),
    "ack: foreign handle": acknowledges(FOREIGN),
    "ack: two foreign handles": acknowledges(FOREIGN, f"{FOREIGN}0"),
    "change: foreign handle": changes(30),
    "change: no handle": changes(30, ""),
    "change: invisible for 13 h": changes(13 * 3600),
    "change: invisible for -1 s": changes(-1),
    "dead letter: foreign handle": asks(
        "ForwardMessageToDeadLetterQueue",
        group=Resource(name=GROUP),
        topic=Resource(name=TOPIC),
        receipt_handle=FOREIGN,
        message_id="m",
    ),
    "route: topic": routes(TOPIC),
    "route: topic that does not exist": routes("absent"),
    "route: topic with a blank": routes("a b"),
    "route: no endpoints": routes(TOPIC, named=False),
    "assignment: topic": routes(TOPIC, name="QueryAssignment"),
    "assignment: topic with a blank": routes("a b", name="QueryAssignment"),
    "assignment: no endpoints": routes(TOPIC, named=False, name="QueryAssignment"),
    "recall: foreign handle": asks("RecallMessage", topic=Resource(name=TOPIC), recall_handle=FOREIGN),
    "recall: a delayed message": recalls_a_delayed_message,
    "recall: no handle": asks("RecallMessage", topic=Resource(name=TOPIC)),
    "offset: update": asks("UpdateOffset"),
    "offset: get": asks("GetOffset"),
    "offset: query": asks("QueryOffset"),
    "send: no client id": without_client(sends_one()),
    "route: no client id": without_client(routes(TOPIC)),
}


def frame(code: int, body: bytes = b"", **fields: Any) -> Callable[[RemotingPeer], Awaitable[int]]:
    """Return a request over remoting; it returns the code of the answer."""

    async def ask(peer: RemotingPeer) -> int:
        return (await peer.call(code, fields, body)).code

    return ask


def remoting_send(body: bytes = b"x", **fields: Any) -> Callable[[RemotingPeer], Awaitable[int]]:
    async def ask(peer: RemotingPeer) -> int:
        return (await peer.send(body, **fields)).code

    return ask


PULL: dict[str, Any] = {
    "queueId": 0,
    "maxMsgNums": 32,
    "sysFlag": 4,
    "commitOffset": 0,
    "suspendTimeoutMillis": 0,
    "subVersion": 0,
}
QUEUE: dict[str, Any] = {"topic": TOPIC, "queueId": 0}
# To the name server.
OF_NAMES = {
    "unknown request": frame(9999),
    "route: topic": frame(RequestCode.GET_ROUTE, topic=TOPIC),
    "route: topic that does not exist": frame(RequestCode.GET_ROUTE, topic="absent"),
}
# To the broker.
OF_BROKER = {
    "unknown request to the broker": frame(9999),
    "send: a message": remoting_send(),
    "send: topic that does not exist": remoting_send(topic="absent"),
    "send: topic with a blank": remoting_send(topic="a b"),
    "send: topic of 300 characters": remoting_send(topic="t" * 300),
    "send: topic of the system": remoting_send(topic="RMQ_SYS_TRANS_HALF_TOPIC"),
    "send: body of 5 MiB": remoting_send(bytes(5 * 1024 * 1024)),
    "send: a number that is none": remoting_send(e="x"),
    "end: no such place": frame(
        RequestCode.END_TRANSACTION,
        producerGroup="shop",
        tranStateTableOffset=1 << 61,
        commitLogOffset=1 << 61,
        commitOrRollback=8,
        fromTransactionCheck="false",
        msgId="m",
        transactionId="t",
    ),
    "pull: group that does not exist": frame(
        RequestCode.PULL_MESSAGE, consumerGroup="absent", topic=TOPIC, queueOffset=0, **PULL
    ),
    "pull: no heartbeat before": frame(
        RequestCode.PULL_MESSAGE, consumerGroup=GROUP, topic=TOPIC, queueOffset=0, **PULL
    ),
    "consumers: group that does not exist": frame(RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="absent"),
    "offset: group that does not exist": frame(RequestCode.QUERY_CONSUMER_OFFSET, consumerGroup="absent", **QUEUE),
    "offset: greatest": frame(RequestCode.GET_MAX_OFFSET, **QUEUE),
    "give back: no such place": frame(
        RequestCode.CONSUMER_SEND_MSG_BACK,
        group=GROUP,
        originTopic=TOPIC,
        originMsgId="m",
        offset=1 << 61,
        delayLevel=0,
        maxReconsumeTimes=16,
    ),
}
