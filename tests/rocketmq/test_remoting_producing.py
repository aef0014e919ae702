"""Messages, halves, ends and checks by the remoting protocol, over the service in process."""

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq import checks
from app.rocketmq.credentials import ApiKeys, Credential, Credentials
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.frames import BINARY_HEADER, JSON_HEADER, RemotingFrame
from app.rocketmq.remoting.store_format import properties_text
from app.rocketmq.remoting.transaction_places import transaction_at
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_now
from tests.conftest import assembled, client_of, settings_of
from tests.support.keyed_services import made, start
from tests.support.refusing_service import RefusingService
from tests.support.remoting import ONEWAY, RemotingPeer, read_messages, remoting_over

__all__ = ["start"]

PREPARED, COMMIT, ROLLBACK, UNKNOWN = 4, 8, 12, 0
TRANSACTION = {"f": PREPARED, "properties": {"TRAN_MSG": "true", "PGROUP": "shop", "TAGS": "created", "shop": "s1"}}


@pytest.fixture(params=[JSON_HEADER, BINARY_HEADER], ids=["json", "binary"])
async def peer(request: pytest.FixtureRequest, client: httpx.AsyncClient) -> AsyncIterator[RemotingPeer]:
    """A connection to a gateway over the service in process, with headers of either kind."""
    async with remoting_over(client._transport) as (_, port):
        peer = await RemotingPeer.connect(port)
        peer.header = request.param
        yield peer
        await peer.close()


async def half(peer: RemotingPeer, **more: Any) -> tuple[RemotingFrame, UUID]:
    answer = await peer.send(b"order 1030", **{**TRANSACTION, **more})
    assert answer.code == ResultCode.SUCCESS, answer.remark
    # As the client reads it from the id of the message.
    position = int(answer.fields["msgId"][16:], 16)
    transaction = transaction_at(position, int(answer.fields["queueOffset"]))
    assert transaction is not None
    return answer, transaction


def end_of(answer: RemotingFrame, verdict: int, **more: Any) -> dict[str, Any]:
    return {
        "producerGroup": "shop",
        "tranStateTableOffset": answer.fields["queueOffset"],
        "commitLogOffset": int(answer.fields["msgId"][16:], 16),
        "commitOrRollback": verdict,
        "fromTransactionCheck": "false",
        "msgId": answer.fields["transactionId"],
        **more,
    }


async def verdicts(db: Connection) -> dict[str, int | None]:
    found = await db.fetch("select h.transaction_id, o.verdict from half h left join op o using (transaction_id)")
    return {str(row[0]): row[1] for row in found}


async def test_every_topic_has_queues_at_the_address_of_the_connection(peer: RemotingPeer) -> None:
    answer = await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})
    route = json.loads(answer.body)
    host = "127.0.0.1:" + str(peer.writer.get_extra_info("peername")[1])
    assert (answer.code, route["brokerDatas"][0]["brokerAddrs"]) == (ResultCode.SUCCESS, {"0": host})
    assert [(one["readQueueNums"], one["writeQueueNums"]) for one in route["queueDatas"]] == [(4, 4)]
    for topic, code in (("%RETRY%points", 0), ("RMQ_SYS_TRACE_TOPIC", 17), ("a b", 13), ("halfnote.x", 13)):
        assert (await peer.call(RequestCode.GET_ROUTE, {"topic": topic})).code == code


async def test_a_transaction_is_committed_another_rolled_back_and_a_third_left(
    peer: RemotingPeer, db: Connection
) -> None:
    (first, one), (second, two), (third, three) = [await half(peer) for _ in range(3)]
    for answer, verdict in ((first, COMMIT), (second, ROLLBACK), (third, UNKNOWN)):
        assert (await peer.call(RequestCode.END_TRANSACTION, end_of(answer, verdict))).code == ResultCode.SUCCESS
    assert await verdicts(db) == {str(one): 1, str(two): 2, str(three): None}
    stored = await db.fetchrow("select producer_group, tag, headers from half where transaction_id = $1", one)
    assert stored is not None
    assert tuple(stored)[:2] == ("shop", "created")
    assert json.loads(stored[2])["shop"] == "s1"
    refused = await peer.call(RequestCode.END_TRANSACTION, end_of(second, COMMIT))
    assert (refused.code, "Traceback" in str(refused.remark)) == (ResultCode.SYSTEM_ERROR, False)


async def test_an_end_takes_no_answer_if_it_wants_none(peer: RemotingPeer, db: Connection) -> None:
    answer, transaction = await half(peer)
    peer.write(RequestCode.END_TRANSACTION, end_of(answer, COMMIT), flag=ONEWAY)
    # The next answer is of the next request.
    assert (await peer.call(RequestCode.GET_MAX_OFFSET, {"topic": "order", "queueId": 0})).code == 0
    # A client may leave at once.
    peer.writer.close()
    async with asyncio.timeout(30):
        while (await verdicts(db))[str(transaction)] is None:
            await asyncio.sleep(0.05)


async def test_a_repeated_send_is_one_message_also_by_another_queue(peer: RemotingPeer, db: Connection) -> None:
    properties = {"UNIQ_KEY": "7F00000104D218B4AAC24F2E1AB00000"}
    for queue in (0, 3):
        assert (await peer.send(b"x", properties=properties, e=queue)).code == ResultCode.SUCCESS
    assert (await peer.send(b"y", properties=properties)).code == ResultCode.SUCCESS
    rows = await db.fetch("select convert_from(body, 'UTF8'), key from half order by 1")
    assert [tuple(row) for row in rows] == [("x", "queue-0"), ("y", "queue-0")]


async def test_keys_levels_batches_and_compressed_bodies(peer: RemotingPeer, db: Connection) -> None:
    await peer.send(b"keys", properties={"KEYS": "k1 k2"})
    body = b"large " * 1000
    assert (await peer.send(zlib.compress(body), f=1)).code == ResultCode.SUCCESS
    parts = []
    for number in (1, 2):
        properties = properties_text({"UNIQ_KEY": f"id-{number}"}).encode()
        part = b"one" + len(properties).to_bytes(2, "big") + properties
        parts.append(bytes(16) + (3).to_bytes(4, "big") + part)
    batch = await peer.send(b"".join(parts), code=RequestCode.SEND_BATCH_MESSAGE, m="true")
    assert (batch.code, batch.fields["msgId"].count(",")) == (ResultCode.SUCCESS, 1)
    assert (await peer.send(b"later", properties={"DELAY": "3"})).code == ResultCode.SUCCESS
    rows = await db.fetch("select convert_from(body, 'UTF8'), key from half")
    found = {row[0]: row[1] for row in rows}
    assert len(rows) == 5
    assert (found["keys"], body.decode() in found) == ("k1", True)
    delay = await db.fetchval("select deliver_after_s from half where body = 'later'")
    assert 5 <= float(delay) <= 10


@pytest.mark.parametrize(
    ("body", "fields", "code"),
    [
        (b"", {}, ResultCode.MESSAGE_ILLEGAL),
        (b"x" * 3_000_001, {}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"b": "a b"}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"b": "%DLQ%points"}, ResultCode.TOPIC_NOT_EXIST),
        (b"x", {"b": "%RETRY%points"}, ResultCode.MESSAGE_ILLEGAL),
        (
            b"x",
            {"b": "%RETRY%a@b", "properties": {"RETRY_TOPIC": "order", "HALFNOTE_HANDLE": "x"}},
            ResultCode.SYSTEM_ERROR,
        ),
        (b"x", {"e": "one"}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"f": 1}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"f": 0x101}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"UNIQ_KEY": ""}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"DELAY": "soon"}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"long": "x" * 20_000}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"UNIQ_KEY": "a\nb"}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"TAGS": "a\tb"}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"KEYS": "a\nb"}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x", {"properties": {"__SHARDINGKEY": "a\tb"}}, ResultCode.MESSAGE_ILLEGAL),
        (b"x" * 7, {"m": "true"}, ResultCode.MESSAGE_ILLEGAL),
        (b"", {"m": "true"}, ResultCode.MESSAGE_ILLEGAL),
    ],
)
async def test_a_bad_message_is_refused(peer: RemotingPeer, body: bytes, fields: dict[str, Any], code: int) -> None:
    answer = await peer.send(body, **fields)
    assert (answer.code, bool(answer.remark)) == (code, True)


async def test_half_a_character_is_stored_as_a_question_mark(peer: RemotingPeer, db: Connection) -> None:
    """JSON can write it, UTF-8 cannot. Java writes the same."""
    peer.header = JSON_HEADER
    answer = await peer.send(b"x", properties={"TAGS": "a\ud800", "shop": "\udc00é"})
    assert answer.code == ResultCode.SUCCESS, answer.remark
    stored = await db.fetchrow("select tag, headers from half")
    assert stored is not None
    assert (stored[0], json.loads(stored[1])["shop"]) == ("a?", "?é")
    # The connection goes on.
    assert (await peer.call(RequestCode.GET_MAX_OFFSET, {"topic": "order", "queueId": 0})).code == ResultCode.SUCCESS


async def test_a_check_asks_the_producer_and_its_answer_decides(
    peer: RemotingPeer, db: Connection, runtime: Runtime
) -> None:
    answer, transaction = await half(peer, properties={**TRANSACTION["properties"], "KEYS": "k1"})
    async with runtime.database.connection() as connection:
        assert await ask_now(connection, transaction, runtime.clock.now())
    # What is asked about is claimed as soon as a producer says that it is there.
    assert (await peer.heartbeat(producers=("shop",))).code == ResultCode.SUCCESS
    asked = await peer.asked.get()
    [message] = read_messages(asked.body)
    assert (asked.code, asked.wants_no_answer) == (RequestCode.CHECK_TRANSACTION_STATE, True)
    assert (
        transaction_at(int(asked.fields["commitLogOffset"]), int(asked.fields["tranStateTableOffset"])) == transaction
    )
    assert (message.body, message.topic) == (b"order 1030", "order")
    assert message.properties == {
        "UNIQ_KEY": answer.fields["transactionId"],
        "KEYS": "k1",
        "TAGS": "created",
        "shop": "s1",
        "TRAN_MSG": "true",
        "PGROUP": "shop",
    }
    end = end_of(answer, COMMIT, fromTransactionCheck="true")
    assert (await peer.call(RequestCode.END_TRANSACTION, end)).code == ResultCode.SUCCESS
    assert await verdicts(db) == {str(transaction): 1}
    assert await db.fetchval("select source from op") == 1


async def test_a_check_that_has_no_form_for_the_client_holds_up_no_other(dsn: str) -> None:
    settings = settings_of(dsn, headers_limit_bytes=65_536)
    async with (
        assembled(settings, dsn) as runtime,
        client_of(runtime) as client,
        remoting_over(client._transport) as (gateway, port),
    ):
        shape = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
        assert (await client.put("/producer-groups/shop", json=shape)).status_code == 201
        halves = []
        # The keys of the first have more bytes than the format of RocketMQ's messages has room for.
        for keys in (json.dumps(["k" * 40_000]), '["k"]', '["k"]'):
            message = {"topic": "order", "body": 1, "headers": {"rocketmq-keys": keys}}
            half = {"producer_group": "shop", "messages": [message], "check": {"include_body": True}}
            answer = await client.post("/half", json=half)
            assert answer.status_code == 201, answer.text
            halves.append(UUID(answer.json()["transaction_id"]))
        for transaction in halves:
            async with runtime.database.connection() as connection:
                assert await ask_now(connection, transaction, runtime.clock.now())
        peer = await RemotingPeer.connect(port)
        assert (await peer.heartbeat(producers=("shop",))).code == ResultCode.SUCCESS
        async with asyncio.timeout(60):
            asked = [await peer.asked.get() for _ in range(2)]
        assert {one.code for one in asked} == {RequestCode.CHECK_TRANSACTION_STATE}
        counted = gateway.metrics.exposition().decode()
        assert 'halfnote_rocketmq_checks_total{outcome="not_encoded",protocol="remoting"} 1.0' in counted
        await peer.close()


class SlowConnection:
    """A connection whose client takes what was sent when the test says so."""

    number, host, takes_answers = 1, ("127.0.0.1", 9876), True

    def __init__(self) -> None:
        self.sent: asyncio.Queue[RemotingFrame] = asyncio.Queue()
        self.takes = asyncio.Event()

    def send(self, frame: RemotingFrame) -> bool:
        self.sent.put_nowait(frame)
        return True

    async def all_taken(self) -> None:
        await self.takes.wait()


async def test_the_next_checks_are_claimed_when_a_producer_has_taken_those_before(
    client: httpx.AsyncClient, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "CHECKS_MAX", 1)
    served = client._transport
    assert isinstance(served, httpx.AsyncBaseTransport)
    service = RefusingService(served)
    shape = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
    assert (await client.put("/producer-groups/shop", json=shape)).status_code == 201
    async with remoting_over(service) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        transactions = [(await half(peer))[1] for _ in range(2)]
        for transaction in transactions:
            async with runtime.database.connection() as connection:
                assert await ask_now(connection, transaction, runtime.clock.now())
        slow = SlowConnection()
        gateway.clients.connect("slow", ApiKeys(None, None), slow).has_producers({"shop": "shop"})
        gateway.clients.on_change()
        async with asyncio.timeout(60):
            await slow.sent.get()
            # A claim would begin at once.
            for _ in range(100):
                await asyncio.sleep(0)
            assert [action for action, _ in service.asked].count("claim") == 1
            slow.takes.set()
            assert (await slow.sent.get()).code == RequestCode.CHECK_TRANSACTION_STATE
        await peer.close()


async def test_what_is_not_served_is_said(peer: RemotingPeer) -> None:
    for code in (324, 361, 400, 9999):
        assert (await peer.call(code)).code == ResultCode.REQUEST_CODE_NOT_SUPPORTED
    assert (await peer.call(RequestCode.END_TRANSACTION, {})).code == ResultCode.SYSTEM_ERROR
    bad = await peer.call(
        RequestCode.END_TRANSACTION, {"commitLogOffset": -1, "tranStateTableOffset": 1, "producerGroup": "shop"}
    )
    assert bad.code == ResultCode.SYSTEM_ERROR
    assert (await peer.call(RequestCode.HEART_BEAT, body=b"[1")).code == ResultCode.SYSTEM_ERROR


async def test_signed_requests_have_the_rights_of_their_api_keys(start: Any) -> None:
    _, admin = await start()
    group = {"checks": "claim"}
    assert (await admin.put("/producer-groups/shop", json=group)).status_code == 201
    key = (await made(admin, "producer", producer_groups=["shop"], topics=["order"]))["key"]
    known = {"shop": Credential(b"shop-secret", ApiKeys(key, None))}
    async with remoting_over(admin._transport, Credentials(known, ApiKeys(None, None))) as (_, port):
        for access, code in (
            (("shop", "shop-secret"), ResultCode.SUCCESS),
            (("shop", "another"), ResultCode.NO_PERMISSION),
            (("nobody", "shop-secret"), ResultCode.NO_PERMISSION),
            (None, ResultCode.NO_PERMISSION),
        ):
            peer = await RemotingPeer.connect(port, access)
            assert (await peer.send(b"x")).code == code
            assert (await peer.call(RequestCode.GET_ROUTE, {"topic": "order"})).code == code
            await peer.close()
        peer = await RemotingPeer.connect(port, ("shop", "shop-secret"))
        # The key may use one topic, and may register no group.
        assert (await peer.send(b"x", topic="billing")).code == ResultCode.NO_PERMISSION
        answer = await peer.send(b"x", group="billing")
        assert answer.code in (ResultCode.NO_PERMISSION, ResultCode.TOPIC_NOT_EXIST)
        await peer.close()
