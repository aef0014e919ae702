"""One contract for the service and the coordinator in memory: both give the same answers to the same requests."""

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any
from uuid import uuid4

import httpx
import pytest
from halfnote import HalfFailed, Outgoing, PlainFailed, TransactionProducer
from halfnote.hosting import Answering, Reply
from halfnote.ids import new_id
from halfnote.testing import Coordinator
from halfnote.times import instant

from app.checkback.loop import CheckBack
from app.database.connection import Connection
from app.relay.loop import Relay
from app.runtime.state import Runtime
from tests.conftest import register_group
from tests.support.check_responder import Responder
from tests.support.check_stepping import in_doubt, turn
from tests.support.relay_stepping import subscribe, turn_until

MESSAGE = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}


@pytest.fixture
async def in_memory() -> AsyncIterator[httpx.AsyncClient]:
    """The coordinator in memory, with the groups `shop` and `bank`."""
    transport = Coordinator("shop", "bank").transport()
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.fixture
async def the_service(client: httpx.AsyncClient, db: Connection) -> httpx.AsyncClient:
    """The service over Postgres, with the same groups."""
    for name in ("shop", "bank"):
        await register_group(db, name)
    return client


@pytest.fixture(params=["in_memory", "the_service"])
def halfnote(request: pytest.FixtureRequest) -> httpx.AsyncClient:
    """Either of them."""
    found: httpx.AsyncClient = request.getfixturevalue(request.param)
    return found


def half(**fields: Any) -> dict[str, Any]:
    return {"producer_group": "shop", "messages": [MESSAGE], **fields}


def end(transaction_id: Any, verdict: str, **fields: Any) -> dict[str, Any]:
    return {"transaction_id": str(transaction_id), "producer_group": "shop", "verdict": verdict, **fields}


async def begun(halfnote: httpx.AsyncClient, **fields: Any) -> str:
    answer = await halfnote.post("/half", json=half(**fields))
    assert answer.status_code == 201
    found: str = answer.json()["transaction_id"]
    return found


def kind(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("/problems/")


async def test_a_half_and_its_repetition(halfnote: httpx.AsyncClient) -> None:
    one = str(new_id())
    first = await halfnote.post("/half", json=half(transaction_id=one, messages=[MESSAGE, MESSAGE]))
    assert first.status_code == 201
    assert first.json()["transaction_id"] == one
    assert first.json()["messages"] == [{"message_id": f"{one}-{n}", "topic": "order"} for n in (0, 1)]
    assert first.json().keys() == {"transaction_id", "born_at", "first_check_at", "replayed", "messages"}
    again = await halfnote.post(
        "/half", json=half(transaction_id=one, messages=[{**MESSAGE, "headers": None}, MESSAGE])
    )
    assert again.status_code == 200
    assert again.json() == {**first.json(), "replayed": True}


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [MESSAGE, MESSAGE]}, "messages"),
    ({"messages": [{**MESSAGE, "topic": "other"}]}, "messages[0].topic"),
    ({"messages": [{**MESSAGE, "body": 1}]}, "messages[0].body"),
    ({"messages": [{**MESSAGE, "key": None}]}, "messages[0].key"),
    ({"messages": [{**MESSAGE, "headers": {"a": "b"}}]}, "messages[0].headers"),
    ({"context": {"order": 1030}}, "context"),
    ({"check": {"max_checks": 3}}, "check"),
    ({"producer_group": "bank"}, "producer_group"),
]


async def test_an_id_with_other_content_is_refused(halfnote: httpx.AsyncClient) -> None:
    one = await begun(halfnote)
    for changed, field in CHANGED:
        answer = await halfnote.post("/half", json=half(transaction_id=one, **changed))
        assert (*kind(answer), answer.json()["field"]) == (409, "content-differs", field)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"more": 1}, "invalid", "more"),
    ({"messages": []}, "invalid", "messages"),
    ({"messages": [MESSAGE] * 101}, "invalid", "messages"),
    ({"messages": [{"topic": "order"}]}, "invalid", "messages[0].body"),
    ({"messages": [{"topic": "", "body": 1}]}, "invalid", "messages[0].topic"),
    ({"messages": [{"topic": "a\nb", "body": 1}]}, "invalid", "messages[0].topic"),
    ({"messages": [{"topic": "halfnote.x", "body": 1}]}, "topic-reserved", "messages[0].topic"),
    ({"messages": [{"topic": "order", "body_base64": "!"}]}, "invalid", "messages[0].body_base64"),
    ({"transaction_id": str(uuid4())}, "invalid", "transaction_id"),
    ({"producer_group": "nobody"}, "group-unregistered", "producer_group"),
    ({"context": "x" * 5000}, "invalid", "context"),
]


async def test_what_is_wrong_is_named(halfnote: httpx.AsyncClient) -> None:
    for path in ("/half", "/messages"):
        for fields, type_, field in WRONG:
            answer = await halfnote.post(path, json=half(**fields))
            assert (*kind(answer), answer.json()["field"]) == (422, type_, field)


async def test_an_id_of_another_time_is_refused_unless_it_is_stored(halfnote: httpx.AsyncClient) -> None:
    for at, id_time in ((time.time() + 600, None), (2**48 / 1000 - 1, "beyond year 9999")):
        answer = await halfnote.post("/half", json=half(transaction_id=str(new_id(at))))
        assert kind(answer) == (422, "id-time-skew")
        found = answer.json()
        assert found["skew_s"] == pytest.approx(at - time.time(), abs=100)
        own = instant(found["coordinator_time"])
        assert own is not None
        if id_time is None:
            named = instant(found["id_time"])
            assert named is not None
            assert (named - own).total_seconds() == pytest.approx(found["skew_s"], abs=1)
        else:
            assert found["id_time"] == id_time


@pytest.mark.parametrize(("verdict", "state"), [("commit", "committed"), ("rollback", "rolled_back")])
async def test_a_verdict_stands_for_good(halfnote: httpx.AsyncClient, verdict: str, state: str) -> None:
    one = await begun(halfnote, context={"order": 1030})
    first = await halfnote.post("/end", json=end(one, verdict, reason="so it is"))
    assert first.status_code == 200
    reported = first.json()
    assert (reported["verdict"], reported["source"], reported["replayed"]) == (verdict, "producer", False)
    assert ("messages" in reported) == (verdict == "commit")
    again = await halfnote.post("/end", json=end(one, verdict))
    assert again.status_code == 200
    assert again.json() == {**reported, "replayed": True}
    other = "rollback" if verdict == "commit" else "commit"
    refused = await halfnote.post("/end", json=end(one, other))
    assert kind(refused) == (409, "verdict-conflict")
    assert refused.json()["recorded"] == {name: reported[name] for name in ("verdict", "source", "decided_at")}
    unknown = await halfnote.post("/end", json=end(one, "unknown"))
    assert (unknown.status_code, unknown.json()["state"]) == (202, state)
    # A second run must not do its local work.
    fresh = half(transaction_id=str(new_id()))
    repeats = [half(transaction_id=one, context={"order": 1030}), fresh, fresh]
    alone = await halfnote.post("/half", json=repeats[0])
    assert (alone.status_code, alone.json()["replayed"], alone.json()["verdict"]) == (200, True, verdict)
    outcomes = (await halfnote.post("/halves", json={"halves": repeats})).json()["outcomes"]
    assert [(outcome["status"], outcome.get("verdict")) for outcome in outcomes] == [
        (200, verdict),
        (201, None),
        (200, None),
    ]
    shown = (await halfnote.get(f"/transactions/{one}")).json()
    assert (shown["state"], shown["producer_group"], shown["context"]) == (state, "shop", {"order": 1030})
    assert shown["verdict"]["reason"] == "so it is"
    assert kind(await halfnote.post(f"/transactions/{one}/check")) == (409, "already-decided")


async def test_unknown_changes_nothing(halfnote: httpx.AsyncClient) -> None:
    one = await begun(halfnote)
    answer = await halfnote.post("/end", json=end(one, "unknown", from_check=True))
    assert answer.status_code == 202
    assert answer.json() == {"transaction_id": one, "verdict": "unknown", "state": "half"}
    asked = await halfnote.post(f"/transactions/{one}/check")
    assert asked.status_code == 202
    assert asked.json()["transaction_id"] == one
    # `from_check` counts only while a check is open.
    ended = await halfnote.post("/end", json=end(one, "commit", from_check=True))
    assert ended.json()["source"] == "producer"


async def test_ends_of_others_are_refused(halfnote: httpx.AsyncClient) -> None:
    one = await begun(halfnote)
    assert kind(await halfnote.post("/end", json=end(one, "commit", producer_group="bank"))) == (403, "wrong-group")
    assert kind(await halfnote.post("/end", json=end(new_id(), "commit"))) == (404, "transaction-unknown")
    assert kind(await halfnote.get(f"/transactions/{new_id()}")) == (404, "transaction-unknown")
    assert kind(await halfnote.post(f"/transactions/{new_id()}/check")) == (404, "transaction-unknown")
    for wrong in (
        end(one, "maybe"),
        end("1030", "commit"),
        end(one, "commit", more=1),
        end(one, "commit", reason="x" * 1001),
    ):
        assert kind(await halfnote.post("/end", json=wrong)) == (422, "invalid")


async def test_what_is_no_json_is_refused(halfnote: httpx.AsyncClient) -> None:
    answer = await halfnote.post("/half", content=b"{", headers={"content-type": "application/json"})
    assert kind(answer) == (400, "malformed-json")


async def test_offsets_go_on_by_one_in_the_order_of_commits(halfnote: httpx.AsyncClient) -> None:
    first, second = await begun(halfnote), await begun(halfnote, messages=[MESSAGE, MESSAGE])
    offsets = []
    for one in (second, first):
        reported = (await halfnote.post("/end", json=end(one, "commit"))).json()
        offsets += [message["offset"] for message in reported["messages"]]
    plain = (await halfnote.post("/messages", json=half())).json()
    offsets += [message["offset"] for message in plain["messages"]]
    assert offsets == list(range(offsets[0], offsets[0] + 4))
    shown = (await halfnote.get(f"/transactions/{second}")).json()
    assert [message["offset"] for message in shown["messages"]] == offsets[:2]


async def test_plain_messages(halfnote: httpx.AsyncClient) -> None:
    one = str(new_id())
    first = await halfnote.post("/messages", json=half(transaction_id=one))
    assert first.status_code == 201
    again = await halfnote.post("/messages", json=half(transaction_id=one))
    assert again.status_code == 200
    assert again.json() == {**first.json(), "replayed": True}
    assert kind(await halfnote.post("/half", json=half(transaction_id=one))) == (409, "content-differs")
    shown = (await halfnote.get(f"/transactions/{one}")).json()
    assert (shown["state"], shown["verdict"]["source"]) == ("committed", "producer")


async def test_groups(halfnote: httpx.AsyncClient) -> None:
    shape = {"check_urls": ["http://127.0.0.1:9/check"], "immunity_s": 3}
    made = await halfnote.put("/producer-groups/new", json=shape)
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    again = await halfnote.put("/producer-groups/new", json=shape)
    assert again.status_code == 200
    assert "secret" not in again.json()
    assert (again.json()["name"], again.json()["immunity_s"]) == ("new", 3)
    given = {**shape, "secret": made.json()["secret"]}
    assert (await halfnote.put("/producer-groups/own", json=given)).json()["secret"] is None
    assert kind(await halfnote.put("/producer-groups/none", json={"check_urls": []})) == (422, "invalid")
    assert await begun(halfnote, producer_group="new")


@pytest.mark.parametrize("off_s", [600, -600])
async def test_a_clock_that_is_ten_minutes_off_is_named(
    halfnote: httpx.AsyncClient, off_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says whose clock is off, and by how much; of an id that the caller chose it says that."""
    transport = halfnote._transport
    word, off = ("ahead of", "new") if off_s > 0 else ("behind", "old")
    reported = rf".*\) is (60[0-9]|59[0-9]) s {word} the coordinator's"
    monkeypatch.setattr("halfnote.conversation.new_id", lambda: new_id(time.time() + off_s))
    async with TransactionProducer("http://localhost", group="shop", transport=transport) as producer:
        for chosen, what in (
            ({}, "this machine's clock"),
            ({"transaction_id": new_id(time.time() + off_s)}, f"its id is too {off}: the time in it"),
        ):
            with pytest.raises(HalfFailed, match=what + reported):
                async with producer.transaction(Outgoing("order", 1), **chosen):
                    raise AssertionError
            with pytest.raises(PlainFailed, match=what + reported):
                await producer.send_plain(Outgoing("order", 1), **chosen)


@pytest.mark.parametrize(("policy", "immunity_s"), [({}, 6), ({"check": {"immunity_s": 60}}, 60)])
async def test_when_it_is_asked_first(halfnote: httpx.AsyncClient, policy: dict[str, Any], immunity_s: int) -> None:
    answer = (await halfnote.post("/half", json=half(**policy))).json()
    born_at, first_check_at = (instant(answer[name]) for name in ("born_at", "first_check_at"))
    assert (first_check_at - born_at).total_seconds() == immunity_s


class Recorder:
    """An endpoint that keeps its requests."""

    calls_async = False

    def __init__(self) -> None:
        self.came: list[tuple[dict[str, str], bytes]] = []

    def answering(self, headers: Mapping[str, str], body: bytes) -> Answering:
        """Keep it, and say nothing."""
        self.came.append((dict(headers), body))
        return Reply(204)
        yield  # a generator, as endpoints are


def without_ids(headers: Mapping[str, str], body: bytes, transaction_id: str) -> tuple[dict[str, str], str]:
    """Return a request without the fields that differ each time and those that HTTP adds."""
    own = {
        name: "signed" if name in ("webhook-signature", "webhook-timestamp") else value.replace(transaction_id, "id")
        for name, value in headers.items()
        if name.startswith(("webhook-", "ce-", "halfnote-")) or name == "content-type"
    }
    own.update(dict.fromkeys(own.keys() & {"ce-time", "halfnote-offset"}, "differs"))
    return own, re.sub(r'("born_at": ?)"[^"]*"', r'\1"then"', body.decode().replace(transaction_id, "id"))


async def test_checks_are_as_the_service_makes_them(
    the_service: httpx.AsyncClient, runtime: Runtime, db: Connection
) -> None:
    coordinator, recorder, checks = Coordinator("shop"), Recorder(), CheckBack()
    async with Responder(status=204) as shop:
        await db.execute("update producer_group set check_urls = $1", [shop.url])
        one = await in_doubt(the_service, runtime, context={"order": 1030})
        assert await turn(runtime, checks) == 1
    async with httpx.AsyncClient(transport=coordinator.transport(), base_url="http://localhost") as in_memory:
        message = {"topic": "order", "key": "order-1030", "tag": "created", "body": {"order": 1030}}
        another = await begun(in_memory, messages=[message], context={"order": 1030})
    await coordinator.check(recorder)  # type: ignore[arg-type]
    [(headers, body)], [call] = recorder.came, shop.calls
    made, asked = without_ids(headers, body, another), without_ids(call.headers, call.body, str(one))
    assert made[0] == asked[0]
    assert json.loads(made[1]) == json.loads(asked[1])


async def test_deliveries_are_as_the_service_makes_them(the_service: httpx.AsyncClient, runtime: Runtime) -> None:
    sent = half(messages=[{**MESSAGE, "key": 'café "1"', "headers": {"trace": "50% öff"}}])
    coordinator, recorder, relay = Coordinator("shop"), Recorder(), Relay(runtime)
    async with Responder() as points:
        await subscribe(the_service, points, name="tests")
        one = (await the_service.post("/messages", json=sent)).json()["transaction_id"]
        await turn_until(relay, runtime, lambda: points.calls, within_s=60)
        await relay.drain(runtime)
    async with httpx.AsyncClient(transport=coordinator.transport(), base_url="http://localhost") as in_memory:
        another = (await in_memory.post("/messages", json=sent)).json()["transaction_id"]
    await coordinator.deliver(recorder)  # type: ignore[arg-type]
    [(headers, body)], [call] = recorder.came, points.calls
    made, reported = without_ids(headers, body, another), without_ids(call.headers, call.body, one)
    assert made[0] == reported[0]
    assert json.loads(made[1]) == json.loads(reported[1])
