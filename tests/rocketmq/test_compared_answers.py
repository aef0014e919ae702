"""Answers to bad and unusual requests, and the settings that clients get: RocketMQ 5.5.0's beside Halfnote's."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict

from app.rocketmq.protocol import definition_pb2 as definition
from tests.conftest import shares
from tests.support.gateway import RocketClient, consumer_of, producer_of
from tests.support.remoting import RemotingPeer
from tests.support.rocketmq_pair import Pair, pair_of
from tests.support.rocketmq_requests import GROUP, OF_BROKER, OF_NAMES, OVER_GRPC, TOPIC

pytestmark = [pytest.mark.timeout(590), shares]


# Where the answers differ: RocketMQ's, and Halfnote's. docs/from-rocketmq.md has the reasons.
OTHER_STATUSES: dict[str, tuple[str, str]] = {
    "send: topic that does not exist": ("MESSAGE_PROPERTY_CONFLICT_WITH_TYPE", "OK"),
    "receive: topic that does not exist": ("TOPIC_NOT_FOUND", "MESSAGE_NOT_FOUND"),
    "route: topic that does not exist": ("TOPIC_NOT_FOUND", "OK"),
    "send: properties of 10 KiB": ("OK", "MESSAGE_PROPERTIES_TOO_LARGE"),
    **{
        f"send: {what}": ("OK", "MESSAGE_CORRUPTED")
        for what in ("wrong MD5", "wrong SHA1", "wrong CRC32", "gzip that is none")
    },
    **{
        f"end: {what}": ("INTERNAL_SERVER_ERROR", "INVALID_TRANSACTION_ID")
        for what in ("foreign transaction id", "unknown transaction id", "unknown id, no resolution")
    },
    **dict.fromkeys(
        (
            *("ack: no handle", "ack: foreign handle", "ack: two foreign handles"),
            *("change: foreign handle", "change: no handle", "dead letter: foreign handle"),
        ),
        ("INTERNAL_SERVER_ERROR", "INVALID_RECEIPT_HANDLE"),
    ),
    "ack: no entry": ("INTERNAL_SERVER_ERROR", "BAD_REQUEST"),
    "receive: SQL that is none": ("INTERNAL_SERVER_ERROR", "ILLEGAL_FILTER_EXPRESSION"),
    "receive: SQL with a comparison of numbers": ("MESSAGE_NOT_FOUND", "ILLEGAL_FILTER_EXPRESSION"),
    "route: no endpoints": ("OK", "ILLEGAL_ACCESS_POINT"),
    "assignment: no endpoints": ("OK", "ILLEGAL_ACCESS_POINT"),
    **{
        f"recall: {what}": ("INTERNAL_SERVER_ERROR", "NOT_IMPLEMENTED")
        for what in ("foreign handle", "a delayed message", "no handle")
    },
    **{f"offset: {what}": ("gRPC: UNIMPLEMENTED", "NOT_IMPLEMENTED") for what in ("update", "get", "query")},
}
OTHER_RESULTS: dict[str, tuple[int, int]] = {
    # Topics and groups come into being by their first use.
    "route: topic that does not exist": (17, 0),
    "send: topic that does not exist": (17, 0),
    # RocketMQ 5.5 has a number of its own for a parameter that cannot be right; MESSAGE_ILLEGAL is of all versions.
    "send: topic with a blank": (29, 13),
    "send: topic of 300 characters": (29, 13),
    "send: a number that is none": (1, 13),
    "send: topic of the system": (16, 17),
    # A consumer is known by its heartbeat, which clients send before anything else.
    "pull: group that does not exist": (0, 24),
    "pull: no heartbeat before": (0, 24),
    "consumers: group that does not exist": (1, 24),
    "offset: group that does not exist": (0, 24),
    "give back: no such place": (1, 24),
}
WAITS = [f"{seconds}s" for seconds in (*range(60, 601, 60), 1200, 1800, 3600, 7200)]
OTHER_SETTINGS: dict[str, tuple[Any, Any]] = {
    f"{kind} consumer: {name}": values
    for kind in ("simple", "push")
    for name, values in {
        # A subscription's own list of waits, whose default is that of RocketMQ 4 clients.
        "backoff_policy.customized_backoff.next": (["1s", "5s", "10s", "30s", *WAITS], ["10s", "30s", *WAITS]),
        # There are no lite topics.
        "subscription.lite_subscription_quota": (2000, None),
        "subscription.max_lite_topic_size": (64, None),
    }.items()
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, shared_dsn: str) -> AsyncIterator[Pair]:
    async with pair_of(tmp_path_factory.mktemp("pair"), shared_dsn, "MIXED") as made:
        await made.add(TOPIC, TOPIC, **{GROUP: {}, "nothing": {}, "tags": {}, "numbers": {}})
        yield made


def differing(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    for name, value in theirs.items():
        print(f"| {name} | {value} | {ours[name]} |")
    return {name: (value, ours[name]) for name, value in theirs.items() if value != ours[name]}


async def statuses(endpoint: str) -> dict[str, str]:
    async with grpc.aio.insecure_channel(endpoint) as channel:
        rocket = RocketClient(channel)
        consuming, _ = await rocket.connect(consumer_of(GROUP, TOPIC))
        answers = {name: await ask(rocket) for name, ask in OVER_GRPC.items()}
        consuming.cancel()
    return answers


async def test_bad_requests_over_grpc_get_the_same_status(pair: Pair) -> None:
    theirs, ours = await statuses(pair.rocketmq.grpc), await statuses(pair.gateway.endpoint)
    assert differing(theirs, ours) == OTHER_STATUSES


async def settings(endpoint: str) -> dict[str, Any]:
    """Return the settings of each kind of client, one value a field."""
    kinds = {
        "producer": producer_of(TOPIC),
        "simple consumer": consumer_of(GROUP, TOPIC),
        "push consumer": consumer_of(GROUP, TOPIC, client_type=definition.PUSH_CONSUMER),
    }
    found: dict[str, Any] = {}
    async with grpc.aio.insecure_channel(endpoint) as channel:
        for kind, asked in kinds.items():
            stream, answer = await RocketClient(channel).connect(asked)
            for name, value in flat(MessageToDict(answer, preserving_proto_field_name=True)).items():
                found[f"{kind}: {name}"] = value
            stream.cancel()
    return found


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


async def test_clients_get_the_same_settings(pair: Pair) -> None:
    theirs, ours = await settings(pair.rocketmq.grpc), await settings(pair.gateway.endpoint)
    every = dict.fromkeys([*theirs, *ours])
    assert differing({n: theirs.get(n) for n in every}, {n: ours.get(n) for n in every}) == OTHER_SETTINGS


async def test_bad_requests_over_remoting_get_the_same_result(pair: Pair) -> None:
    theirs, ours = {}, {}
    async with AsyncExitStack() as stack:

        async def connected(port: int) -> RemotingPeer:
            peer = await RemotingPeer.connect(port)
            stack.push_async_callback(peer.close)
            return peer

        names = await connected(int(pair.rocketmq.names.rpartition(":")[2]))
        broker, gateway = await connected(pair.rocketmq.broker_port), await connected(pair.gateway.remoting_port)
        for asked, peer in ((OF_NAMES, names), (OF_BROKER, broker)):
            for name, ask in asked.items():
                theirs[name], ours[name] = await ask(peer), await ask(gateway)
    assert differing(theirs, ours) == OTHER_RESULTS
