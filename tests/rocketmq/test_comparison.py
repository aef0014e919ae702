"""The same drivers of Apache's clients against RocketMQ 5.5.0 and against Halfnote: what each client saw, compared.

The table in docs/from-rocketmq.md has the result.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.conftest import shares
from tests.support.rocketmq_clients import REMOTING_VERSIONS, driver, ran, remoting_driver
from tests.support.rocketmq_pair import Pair, pair_of

Said = Sequence[dict[str, Any]]
LANGUAGES = ("python", "java", "go", "node")
# A message that failed for the last time becomes a dead letter of RocketMQ's when it would come again.
STAYS_S = "15"

pytestmark = [pytest.mark.timeout(590), shares]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory, shared_dsn: str) -> AsyncIterator[Pair]:
    async with pair_of(tmp_path_factory.mktemp("pair"), shared_dsn, "TRANSACTION") as made:
        yield made


def bodies(said: Said, what: str) -> set[str]:
    return {one["body"] for one in said if one["what"] == what}


def first_of(said: Said, what: str, body: str) -> dict[str, Any]:
    return next((one for one in said if (one["what"], one.get("body")) == (what, body)), {})


def are_as_sent(said: Said, what: str) -> bool:
    sent = {one["body"]: one["message_id"] for one in said if one["what"] == "sent"}
    got = {one["body"]: one["message_id"] for one in said if one["what"] == what}
    return all(sent[body] == message_id for body, message_id in got.items() if body in sent)


def attempts(said: Said, what: str, body: str) -> list[int]:
    return sorted({one["attempt"] for one in said if (one["what"], one.get("body")) == (what, body)})


def in_order(said: Said, what: str, prefix: str) -> list[str]:
    return [one["body"] for one in said if one["what"] == what and one["body"].startswith(prefix)]


# What a client of RocketMQ 5 saw, by feature, as one value that is the same on both servers.
OVER_GRPC: dict[str, Callable[[Said], object]] = {
    "transaction: commit, rollback": lambda said: sorted({"commit", "rollback"} & bodies(said, "received")),
    "orphans that the checker was asked about": lambda said: sorted(set(in_order(said, "checked", "orphan"))),
    "an unknown check comes again": lambda said: in_order(said, "checked", "orphan-unknown")[:2],
    "what the checks decided": lambda said: sorted(one for one in bodies(said, "received") if one.startswith("orphan")),
    "simple consumer: normal, delayed, grouped": lambda said: sorted(bodies(said, "received")),
    "message ids come back": lambda said: are_as_sent(said, "received") and are_as_sent(said, "checked"),
    "tag, keys, properties": lambda said: (
        first_of(said, "received", "plain").get("tag"),
        sorted(first_of(said, "received", "plain").get("keys", ())),
        first_of(said, "received", "plain").get("properties", {}).get("shop"),
    ),
    "message group": lambda said: first_of(said, "received", "fifo-0").get("group"),
    "push consumer": lambda said: sorted(bodies(said, "pushed")),
    "push consumer: retry": lambda said: attempts(said, "pushed", "plain"),
    "push consumer: attempts until the dead letter": lambda said: attempts(said, "pushed", "poison"),
    # Go's client goes on with the next message while one waits for its retry, if RocketMQ gave it both at once, as on a
    # busy machine. So the order itself is required of Halfnote alone, below.
    "FIFO push consumer: what came, with a failure": lambda said: sorted(in_order(said, "ordered", "fifo-")),
    "FIFO push consumer: attempts until the dead letter": lambda said: len(in_order(said, "ordered", "poison")),
}
# And what a client over remoting saw.
OVER_REMOTING: dict[str, Callable[[Said], object]] = {
    "send status": lambda said: sorted({one["status"] for one in said if one["what"] == "sent"}),
    "transaction: commit, rollback": lambda said: sorted({"commit", "rollback"} & bodies(said, "consumed")),
    "unknown transactions that the listener was asked about": lambda said: sorted(
        set(in_order(said, "checked", "unknown"))
    ),
    "an unknown check comes again": lambda said: in_order(said, "checked", "unknown-twice")[:2],
    "what the checks decided": lambda said: sorted(
        one for one in bodies(said, "consumed") if one.startswith("unknown")
    ),
    "transaction ids come back": lambda said: (
        first_of(said, "sent", "commit").get("transaction_id")
        == first_of(said, "consumed", "commit").get("transaction_id")
        == first_of(said, "sent", "commit").get("message_id")
    ),
    "normal, delayed, large, one-way, batch": lambda said: sorted(bodies(said, "consumed")),
    "message ids come back": lambda said: are_as_sent(said, "consumed"),
    "tag, keys, properties": lambda said: [
        first_of(said, "consumed", "plain").get(name) for name in ("tag", "keys", "shop")
    ],
    "RECONSUME_LATER": lambda said: attempts(said, "consumed", "plain"),
    "attempts until the dead letter": lambda said: attempts(said, "consumed", "poison"),
    "orderly consumer: order, with a suspended message": lambda said: in_order(said, "ordered", "order-"),
    "orderly consumer: attempts until the dead letter": lambda said: len(in_order(said, "ordered", "poison")),
}


def compare(name: str, theirs: dict[str, object], ours: dict[str, object]) -> None:
    """Print what each saw, and fail with what differs."""
    differs = []
    for feature, value in theirs.items():
        same = value == ours[feature]
        print(f"| {name} | {feature} | {value} | {'the same' if same else ours[feature]} |")
        if not same:
            differs.append(f"{feature}: RocketMQ {value}, Halfnote {ours[feature]}")
    assert differs == []


@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_client_over_grpc_sees_the_same(language: str, pair: Pair, tmp_path: Path) -> None:
    topic, group = f"order-{language}", f"points-{language}"
    push, fifo = f"{group}-push", f"{group}-fifo"
    groups = {group: {}, push: {"retries": 1}, fifo: {"retries": 1, "ordered": True}}
    await pair.add(topic, topic, **groups)
    command = driver(language, tmp_path)
    said = await ran(command, pair.rocketmq.grpc, topic, group, "", "", STAYS_S)
    theirs = {feature: of(said) for feature, of in OVER_GRPC.items()}
    said = await ran(command, pair.gateway.endpoint, topic, group, "", "", STAYS_S)
    ours = {feature: of(said) for feature, of in OVER_GRPC.items()}
    order = in_order(said, "ordered", "fifo-")
    for name in (push, fifo):
        theirs[f"dead letters of {name}"] = await pair.rocketmq.dead_letters(name, 1)
        ours[f"dead letters of {name}"] = await pair.dead_letters(name, topic)
    compare(language, theirs, ours)
    # Two servers that do nothing would give the same answers too.
    # Node's ordered consumer makes a message that failed a dead letter at once.
    at_once = language == "node"
    assert (theirs[f"dead letters of {push}"], theirs[f"dead letters of {fifo}"]) == (1, 2 if at_once else 1)
    tries = ["fifo-1"] if at_once else ["fifo-1", "fifo-1"]
    assert order == ["fifo-0", *tries, "fifo-2"]
    assert theirs["what the checks decided"] == ["orphan-commit", "orphan-unknown"]


@pytest.mark.parametrize("version", REMOTING_VERSIONS)
async def test_a_client_over_remoting_sees_the_same(version: str, pair: Pair, tmp_path: Path) -> None:
    short = version.replace(".", "")
    topic, producers, group = f"order-{short}", f"shop-{short}", f"points-{short}"
    await pair.add(topic, producers, **{group: {"retries": 3}, f"{group}-orderly": {}})
    command = remoting_driver(version, tmp_path, "scenario")
    said = await ran(command, pair.rocketmq.names, topic, producers, group, "", "")
    theirs = {feature: of(said) for feature, of in OVER_REMOTING.items()}
    said = await ran(command, f"127.0.0.1:{pair.gateway.remoting_port}", topic, producers, group, "", "")
    ours = {feature: of(said) for feature, of in OVER_REMOTING.items()}
    # On a busy machine RocketMQ may have two of the one message: its client sends a message back again.
    for consumer, named in ((group, "becomes a dead letter"), (f"{group}-orderly", "orderly: becomes a dead letter")):
        theirs[named] = await pair.rocketmq.dead_letters(consumer, 1) > 0
        ours[named] = await pair.dead_letters(consumer, topic) > 0
    compare(f"remoting {version}", theirs, ours)
    assert theirs["becomes a dead letter"] is theirs["orderly: becomes a dead letter"] is True
    assert theirs["orderly consumer: order, with a suspended message"] == [
        *("order-0", "order-1", "order-2", "order-2", "order-3", "order-4")
    ]
