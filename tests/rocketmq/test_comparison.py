"""The same drivers of Apache's clients against RocketMQ 5.5.0 and against Halfnote: what each client saw, compared."""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway import GatewayProcess
from tests.support.processes import Service
from tests.support.rocketmq_clients import REMOTING_VERSIONS, DriverCommand, driver, ran, remoting_driver
from tests.support.rocketmq_servers import rocketmq_servers

Said = Sequence[dict[str, Any]]
TOPIC, GROUP = "order", "points"
LANGUAGES = ("python", "java", "go", "node")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]


def bodies(said: Said, what: str) -> set[str]:
    return {one["body"] for one in said if one["what"] == what}


def first_of(said: Said, what: str, body: str) -> dict[str, Any]:
    return next((one for one in said if (one["what"], one.get("body")) == (what, body)), {})


def as_sent(said: Said, what: str) -> bool:
    sent = {one["body"]: one["message_id"] for one in said if one["what"] == "sent"}
    got = {one["body"]: one["message_id"] for one in said if one["what"] == what}
    return all(got.get(body) == message_id for body, message_id in sent.items() if body in got)


def attempts(said: Said, what: str, body: str) -> list[int]:
    return sorted({one["attempt"] for one in said if (one["what"], one["body"]) == (what, body)})


# What a client of RocketMQ 5 saw, by feature, as one value that is the same on both servers.
OVER_GRPC: dict[str, Callable[[Said], object]] = {
    "commit and rollback": lambda said: sorted({"commit", "rollback"} & bodies(said, "received")),
    "checker": lambda said: sorted(bodies(said, "checked")),
    "what checks decided": lambda said: sorted(one for one in bodies(said, "received") if one.startswith("orphan")),
    "normal, delayed, grouped": lambda said: sorted({"plain", "delay", "fifo"} & bodies(said, "received")),
    "message ids": lambda said: as_sent(said, "received"),
    "tag, keys, properties": lambda said: (
        first_of(said, "received", "plain").get("tag"),
        sorted(first_of(said, "received", "plain").get("keys", ())),
        first_of(said, "received", "plain").get("properties", {}).get("shop"),
    ),
    "message group": lambda said: first_of(said, "received", "fifo").get("group"),
    "push consumer": lambda said: sorted(bodies(said, "pushed")),
    "retry": lambda said: attempts(said, "pushed", "plain"),
}
# And what a client over remoting saw.
OVER_REMOTING: dict[str, Callable[[Said], object]] = {
    "send status": lambda said: sorted({one["status"] for one in said if one["what"] == "sent"}),
    "commit and rollback": lambda said: sorted({"commit", "rollback"} & bodies(said, "consumed")),
    "listener's check": lambda said: sorted(bodies(said, "checked")),
    "what checks decided": lambda said: sorted(one for one in bodies(said, "consumed") if one.startswith("unknown")),
    "transaction ids": lambda said: (
        first_of(said, "sent", "commit").get("transaction_id")
        == first_of(said, "consumed", "commit").get("transaction_id")
        == first_of(said, "sent", "commit").get("message_id")
    ),
    "normal, delayed, large, batch": lambda said: sorted(
        {"plain", "delay", "large", "batch-1", "batch-2", "oneway"} & bodies(said, "consumed")
    ),
    "message ids": lambda said: as_sent(said, "consumed"),
    "tag, keys, properties": lambda said: [
        first_of(said, "consumed", "plain").get(name) for name in ("topic", "tag", "keys", "shop")
    ],
    "RECONSUME_LATER": lambda said: attempts(said, "consumed", "plain"),
    "given up after maxReconsumeTimes": lambda said: attempts(said, "consumed", "poison"),
    "orderly, with a suspended message": lambda said: [
        one["body"] for one in said if one["what"] == "ordered" and one["body"].startswith("order-")
    ],
}


@pytest.fixture
async def halfnote(tmp_path: Path, dsn: str) -> AsyncIterator[GatewayProcess]:
    """The service and its gateway, with checks and retries after a second."""
    made = Service(tmp_path / "data", HALFNOTE_DATABASE_URL=dsn)
    await made.start()
    gateway = GatewayProcess(tmp_path, str(made.url), "--remoting-port", "0")
    try:
        async with httpx.AsyncClient(base_url=made.url, timeout=60) as admin:
            for group in (TOPIC, "shop"):
                shape = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
                assert (await admin.put(f"/producer-groups/{group}", json=shape)).status_code == 201
            for group in (GROUP, f"{GROUP}-push"):
                pulled = {"topics": [TOPIC], "destination": {"type": "pull"}, "retry": [1, 1, 1]}
                assert (await admin.put(f"/subscriptions/{group}@{TOPIC}", json=pulled)).status_code == 201
            await gateway.start()
            yield gateway
    finally:
        if gateway.process is not None:
            gateway.stop()
        made.stop()


def compared(name: str, theirs: Said, ours: Said, features: dict[str, Callable[[Said], object]]) -> list[str]:
    """Return the rows of the table in docs/from-rocketmq.md, and what differs."""
    differs = []
    for feature, of in features.items():
        pair = of(theirs), of(ours)
        print(f"| {name} | {feature} | {pair[0]} | {'the same' if pair[0] == pair[1] else pair[1]} |")
        if pair[0] != pair[1]:
            differs.append(f"{feature}: RocketMQ {pair[0]}, Halfnote {pair[1]}")
    return differs


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_client_over_grpc_sees_the_same(language: str, halfnote: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "driver").mkdir()
    command = driver(language, tmp_path / "driver")
    theirs = await against_rocketmq(command, tmp_path, grpc=True)
    ours = await ran(command, halfnote.endpoint, TOPIC, GROUP, "", "")
    assert compared(language, theirs, ours, OVER_GRPC) == []


@pytest.mark.parametrize("version", REMOTING_VERSIONS)
async def test_a_client_over_remoting_sees_the_same(version: str, halfnote: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "driver").mkdir()
    command = remoting_driver(version, tmp_path / "driver", "scenario")
    theirs = await against_rocketmq(command, tmp_path, grpc=False)
    ours = await ran(command, f"127.0.0.1:{halfnote.remoting_port}", TOPIC, "shop", GROUP, "", "")
    assert compared(f"remoting {version}", theirs, ours, OVER_REMOTING) == []


async def against_rocketmq(command: DriverCommand, tmp_path: Path, *, grpc: bool) -> Said:
    place = tmp_path / "rocketmq"
    place.mkdir()
    async with rocketmq_servers(place, TOPIC) as servers:
        if grpc:
            return await ran(command, servers.grpc, TOPIC, GROUP, "", "")
        return await ran(command, servers.names, TOPIC, "shop", GROUP, "", "")
