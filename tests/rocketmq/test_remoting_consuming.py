"""Pulls, offsets and messages that are given back by the remoting protocol, over the service in process."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq import answer_sizes, storing
from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.remoting import pulling, remoting_clients
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.remoting_gateway import RemotingGateway
from app.rocketmq.remoting.store_format import properties_text
from app.rocketmq.renewals import HELD_S
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, settings_of
from tests.support.consumers import lapse
from tests.support.keyed_services import made, start
from tests.support.refusing_service import OVERLOADED, RefusingService
from tests.support.remoting import ONEWAY, ReadMessage, RemotingPeer, read_messages, remoting_over

__all__ = ["start"]

NAME = "points@order"


@pytest.fixture
async def gateway(client: httpx.AsyncClient) -> AsyncIterator[tuple[RemotingGateway, int]]:
    async with remoting_over(client._transport) as both:
        yield both


@pytest.fixture
async def peer(gateway: tuple[RemotingGateway, int]) -> AsyncIterator[RemotingPeer]:
    """A connected consumer of the group `points`, which has asked where it begins."""
    peer = await RemotingPeer.connect(gateway[1])
    await joined(peer)
    yield peer
    await peer.close()


async def joined(peer: RemotingPeer, **fields: Any) -> None:
    answer = await peer.heartbeat(consumers={"points": "*"}, **fields)
    assert answer.code == ResultCode.SUCCESS, answer.remark
    peer.origin = await began(peer)
    assert peer.origin > 0


async def began(peer: RemotingPeer) -> int:
    asked = {"consumerGroup": "points", "topic": "order", "queueId": 0}
    return int((await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, asked)).fields["offset"])


async def sent(peer: RemotingPeer, *bodies: bytes, **properties: str) -> None:
    for body in bodies:
        answer = await peer.send(body, properties=properties)
        assert answer.code == ResultCode.SUCCESS, answer.remark


async def pulled(peer: RemotingPeer, offset: int, **fields: Any) -> list[ReadMessage]:
    answer = await peer.pull(offset, **fields)
    messages = read_messages(answer.body)
    assert answer.code == (ResultCode.SUCCESS if messages else ResultCode.PULL_NOT_FOUND), answer.remark
    begin = peer.origin + offset
    assert int(answer.fields["nextBeginOffset"]) == begin + len(messages)
    assert [one.queue_offset for one in messages] == list(range(begin, begin + len(messages)))
    return messages


async def sent_back(peer: RemotingPeer, message: ReadMessage, **fields: Any) -> int:
    asked = {"offset": message.position, "group": "points", "delayLevel": 0, "originMsgId": message.unique_key}
    return (await peer.call(RequestCode.CONSUMER_SEND_MSG_BACK, {**asked, "maxReconsumeTimes": 16, **fields})).code


async def receipts(db: Connection) -> int:
    return int(await db.fetchval("select count(*) from receipt"))


async def test_messages_are_pulled_within_what_halfnote_allows(dsn: str, db: Connection) -> None:
    limited = settings_of(dsn, claim_max=3, claim_held_max_s=20)
    async with (
        assembled(limited, dsn) as runtime,
        client_of(runtime) as client,
        remoting_over(client._transport) as (gateway, port),
    ):
        peer = await RemotingPeer.connect(port)
        await joined(peer)
        await sent(peer, b"a", b"b", b"c")
        messages = await pulled(peer, 0)
        messages += await pulled(peer, 2)
        assert [one.body for one in messages] == [b"a", b"b", b"c"]
        assert await db.fetch("select size, extract(epoch from held_until - claimed_at)::float from pull_claim") == [
            (2, 15),
            (1, 15),
        ]
        assert {one.held_s for one in gateway.renewals._held.values()} == {15}
        await peer.close()


@pytest.mark.parametrize("value", ['{"a": "\\ud800"}', '["\\ud800"]', "[" * 3500])
async def test_headers_of_the_gateway_that_others_set_stop_no_pull(
    peer: RemotingPeer, client: httpx.AsyncClient, value: str
) -> None:
    assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
    headers = {"rocketmq-keys": value, "rocketmq-properties": value, "region": "eu"}
    message = {"topic": "order", "key": "order-1030", "headers": headers, "body": {"order": 1030}}
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": [message]})
    assert answer.status_code == 201, answer.text
    [one] = await pulled(peer, 0)
    assert (one.body, one.properties["KEYS"], one.properties["region"]) == (b'{"order":1030}', "order-1030", "eu")


async def test_what_is_below_a_committed_offset_is_acknowledged(peer: RemotingPeer, db: Connection) -> None:
    given = {"TAGS": "created", "KEYS": "k1 k2", "shop": "s1", "note": "line 1\nline 2"}
    await sent(peer, b"a", b"b", b"c", **given)
    messages = await pulled(peer, 0)
    assert [one.body for one in messages] == [b"a", b"b", b"c"]
    first = messages[0]
    assert {name: first.properties[name] for name in given} == given
    assert (first.topic, first.reconsume_times, len({one.position for one in messages})) == ("order", 0, 3)
    await peer.commit(2)
    assert await receipts(db) == 2
    # The next pull says the same with its own fields.
    assert await pulled(peer, 3, commitOffset=3) == []
    assert await receipts(db) == 3
    await peer.commit(3)
    assert await receipts(db) == 3


async def test_a_pull_that_takes_no_answer_takes_no_message(peer: RemotingPeer, db: Connection) -> None:
    await sent(peer, b"a")
    fields = {"consumerGroup": "points", "topic": "order", "queueId": 0, "queueOffset": 0, "sysFlag": 0}
    peer.write(RequestCode.PULL_MESSAGE, {**fields, "commitOffset": 0, "maxMsgNums": 32}, flag=ONEWAY)
    [one] = await pulled(peer, 0)
    assert (one.body, one.reconsume_times) == (b"a", 0)
    assert await db.fetchval("select count(*) from attempt where kind = 'delivery'") == 0


@pytest.mark.parametrize("first", ["offset", "leave"])
async def test_an_offset_that_a_client_commits_as_it_leaves_counts(
    peer: RemotingPeer, db: Connection, first: str
) -> None:
    await sent(peer, b"a")
    assert len(await pulled(peer, 0)) == 1
    left = {"clientID": peer.client_id, "consumerGroup": "points"}
    if first == "leave":
        assert (await peer.call(RequestCode.UNREGISTER_CLIENT, left)).code == ResultCode.SUCCESS
    fields = {"consumerGroup": "points", "topic": "order", "queueId": 0, "commitOffset": peer.origin + 1}
    peer.write(RequestCode.UPDATE_CONSUMER_OFFSET, fields, flag=ONEWAY)
    if first == "offset":
        peer.write(RequestCode.UNREGISTER_CLIENT, left)
    await peer.writer.drain()
    peer.writer.close()
    async with asyncio.timeout(30):
        while await receipts(db) == 0:
            await asyncio.sleep(0.05)


async def test_an_answer_that_was_lost_comes_again(peer: RemotingPeer, db: Connection) -> None:
    await sent(peer, b"a", b"b")
    assert len(await pulled(peer, 0)) == 2
    again = await pulled_again(peer, 0) + await pulled_again(peer, 1)
    assert [(one.body, one.reconsume_times) for one in again] == [(b"a", 1), (b"b", 1)]
    await peer.commit(2)
    assert await receipts(db) == 2


async def pulled_again(peer: RemotingPeer, offset: int) -> list[ReadMessage]:
    """Pull until there is something that was given back."""
    async with asyncio.timeout(30):
        while not (messages := await pulled(peer, offset)):
            await asyncio.sleep(0.05)
    return messages


async def test_after_a_lost_answer_the_next_one_has_one_message_and_later_ones_more(peer: RemotingPeer) -> None:
    bodies = [str(number).encode() for number in range(answer_sizes.FIRST_BATCH_MAX)]
    await sent(peer, *bodies)
    assert len(await pulled(peer, 0)) == len(bodies)
    # An answer that does not arrive in the client's time uses up an attempt. One message arrives over a slow link.
    got = await pulled_again(peer, 0)
    assert (len(got), got[0].reconsume_times) == (1, 1)
    # An answer without messages arrives, and says nothing of one with many.
    for most in (2, 4):
        got += await pulled_again(peer, len(got))
        assert len(got) <= 2 * most - 1
    while len(got) < len(bodies):
        got += await pulled_again(peer, len(got))
    assert sorted(one.body for one in got) == sorted(bodies)
    assert max(one.reconsume_times for one in got) == 1


async def test_a_pull_brings_few_large_messages(peer: RemotingPeer) -> None:
    large = answer_sizes.BATCH_BYTES // 2
    await sent(peer, *(bytes([number]) * large for number in range(12)))
    assert len(await pulled(peer, 0)) == answer_sizes.FIRST_BATCH_MAX
    assert len(await pulled(peer, 8)) == 2


async def test_a_client_that_begins_again_has_nothing(peer: RemotingPeer, db: Connection) -> None:
    await sent(peer, b"a")
    assert len(await pulled(peer, 0)) == 1
    anew = await began(peer)
    # A commit of the former turn acknowledges nothing.
    await peer.commit(1)
    assert await receipts(db) == 0
    peer.origin = anew
    again = await pulled_again(peer, 0)
    assert [one.body for one in again] == [b"a"]


async def test_another_process_goes_on_above_the_clients_own_offsets(
    peer: RemotingPeer, client: httpx.AsyncClient, db: Connection, runtime: Runtime
) -> None:
    await sent(peer, b"a", b"b")
    assert len(await pulled(peer, 0)) == 2
    async with remoting_over(client._transport) as (_, port):
        other = await RemotingPeer.connect(port)
        other.client_id = peer.client_id
        await other.heartbeat(consumers={"points": "*"})
        # The offsets below were given by the first process. Until there is a message, the client stays at its own.
        own = peer.origin + 2
        answer = await other.pull(own, commitOffset=own)
        assert (answer.code, answer.fields["nextBeginOffset"]) == (ResultCode.PULL_NOT_FOUND, str(own))
        await sent(peer, b"c")
        [message] = read_messages((await other.pull(own, commitOffset=own)).body)
        assert message.body == b"c"
        assert message.queue_offset > own + answer_sizes.BATCH_MAX
        assert await receipts(db) == 0
        # This one acknowledges what it gave out.
        other.origin = message.queue_offset
        await other.commit(1)
        assert await receipts(db) == 1
        await lapse(db, runtime)
        await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
        again = await pulled(other, 1)
        assert sorted((one.body, one.reconsume_times) for one in again) == [(b"a", 1), (b"b", 1)]
        await other.close()


async def test_two_addresses_that_lead_to_one_gateway_have_queues_of_their_own(
    client: httpx.AsyncClient, db: Connection
) -> None:
    async with remoting_over(client._transport, addresses=["mq1.example:9876", "mq2.example:9876"]) as (gateway, port):
        first, second = await RemotingPeer.connect(port), await RemotingPeer.connect(port)
        second.client_id = first.client_id
        await joined(first)
        await joined(second)
        await sent(first, b"a", b"b")
        assert [one.body for one in await pulled(first, 0)] == [b"a", b"b"]
        await sent(first, b"c")
        # The queue 0 of the other address has offsets of its own, and what the first one got is not given back.
        assert [(one.body, one.reconsume_times) for one in await pulled(second, 0)] == [(b"c", 0)]
        assert await pulled(first, 2) == []
        await first.commit(2)
        assert await receipts(db) == 2
        [held] = gateway.renewals._held.values()
        await second.close()
        async with asyncio.timeout(30):
            while gateway.clients.get(held.client_id, held.keys) is not None:
                await asyncio.sleep(0.01)
        # Another connection of the client renews nothing, and does not go on with the queues of the former one.
        again = await RemotingPeer.connect(port)
        again.client_id = first.client_id
        await joined(again)
        again.origin = second.origin
        until = held.until
        await gateway.renewals.renew(until - 10)
        assert held.until == until
        assert await pulled(again, 1) == []
        await again.commit(1)
        assert await receipts(db) == 2
        await first.close()
        await again.close()


async def test_an_orderly_client_from_another_process_begins_again(
    peer: RemotingPeer, client: httpx.AsyncClient
) -> None:
    assert (await locked(peer))[0] == ResultCode.SUCCESS
    assert (await client.get(f"/subscriptions/{NAME}")).json()["ordered"] == "key"
    async with remoting_over(client._transport) as (_, port):
        other = await RemotingPeer.connect(port)
        await other.heartbeat(consumers={"points": "*"})
        answer = await other.pull(7)
        assert (answer.code, answer.fields["nextBeginOffset"]) == (ResultCode.PULL_OFFSET_MOVED, "7")
        other.origin = await began(other)
        assert await pulled(other, 0) == []
        await other.close()


async def locked(peer: RemotingPeer) -> tuple[int, Any]:
    queues = [{"topic": "order", "brokerName": "halfnote", "queueId": 0}]
    body = {"consumerGroup": "points", "clientId": peer.client_id, "mqSet": queues}
    answer = await peer.call(RequestCode.LOCK_BATCH_MQ, body=json.dumps(body).encode())
    return answer.code, json.loads(answer.body or b"{}").get("lockOKMQSet")


async def test_an_orderly_client_gets_each_key_in_order(
    peer: RemotingPeer, gateway: tuple[RemotingGateway, int]
) -> None:
    code, queues = await locked(peer)
    assert (code, len(queues)) == (ResultCode.SUCCESS, 1)
    other = await RemotingPeer.connect(gateway[1])
    await joined(other)
    assert (await locked(other))[0] == ResultCode.SUCCESS
    await sent(peer, b"1", b"2", KEYS="order-1030")
    assert [one.body for one in await pulled(peer, 0, maxMsgNums=1)] == [b"1"]
    assert await pulled(other, 0) == []
    await peer.commit(1)
    assert [one.body for one in await pulled(other, 0)] == [b"2"]
    await other.close()


@pytest.mark.parametrize("level", [0, 1, -1])
async def test_a_message_is_given_back(
    peer: RemotingPeer, db: Connection, client: httpx.AsyncClient, level: int
) -> None:
    await sent(peer, b"a")
    [message] = await pulled(peer, 0)
    assert await sent_back(peer, message, delayLevel=level) == ResultCode.SUCCESS
    # The client commits what it gave back as done.
    await peer.commit(1)
    assert await receipts(db) == 0
    dead = (await client.get("/dead-letters")).json()["items"]
    assert len(dead) == (1 if level < 0 else 0)
    if level >= 0:
        due = await db.fetchval("select extract(epoch from due_at - now()) from delivery_retry")
        assert (float(due) < 2) == (level == 1)
        await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
        assert [one.reconsume_times for one in await pulled(peer, 1)] == [1]
    assert await sent_back(peer, message) == ResultCode.SYSTEM_ERROR


async def test_the_last_attempt_of_a_client_is_a_dead_letter(
    peer: RemotingPeer, db: Connection, client: httpx.AsyncClient
) -> None:
    await sent(peer, b"a")
    [message] = await pulled(peer, 0)
    assert await sent_back(peer, message, maxReconsumeTimes=1) == ResultCode.SUCCESS
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    [message] = await pulled(peer, 1)
    assert await sent_back(peer, message, maxReconsumeTimes=1) == ResultCode.SUCCESS
    assert len((await client.get("/dead-letters")).json()["items"]) == 1


# An orderly consumer, which locks its queues, does not count the attempt that it has just made.
@pytest.mark.parametrize(("locks", "counted", "dead"), [(False, 1, 0), (False, 2, 1), (True, 0, 0), (True, 1, 1)])
async def test_a_message_is_given_back_by_its_properties(
    peer: RemotingPeer,
    gateway: tuple[RemotingGateway, int],
    client: httpx.AsyncClient,
    locks: bool,
    counted: int,
    dead: int,
) -> None:
    if locks:
        assert (await locked(peer))[0] == ResultCode.SUCCESS
    await sent(peer, b"a")
    [message] = await pulled(peer, 0)
    # By another connection, as after a reconnect: the handle is enough.
    other = await RemotingPeer.connect(gateway[1])
    properties = {**message.properties, "RETRY_TOPIC": "order"}
    answer = await other.send(b"a", topic="%RETRY%points", properties=properties, j=counted, l=1)
    assert answer.code == ResultCode.SUCCESS
    assert len((await client.get("/dead-letters")).json()["items"]) == dead
    await other.close()


async def test_a_message_of_a_namespace_is_given_back_by_its_properties(
    gateway: tuple[RemotingGateway, int], client: httpx.AsyncClient
) -> None:
    peer, other = [await RemotingPeer.connect(gateway[1]) for _ in range(2)]
    assert (await peer.heartbeat(consumers={"ns%points": "*"}, topic="ns%order")).code == ResultCode.SUCCESS
    # This begins the subscription, from here on.
    assert await offset_asked(peer, consumerGroup="ns%points", topic="ns%order") == ResultCode.SUCCESS
    assert (await peer.send(b"a", topic="ns%order")).code == ResultCode.SUCCESS
    [message] = read_messages((await peer.pull(0, group="ns%points", topic="ns%order")).body)
    # A client leaves the namespace out of the topics of messages that it got.
    properties = {**message.properties, "RETRY_TOPIC": "order"}
    answer = await other.send(b"a", topic="%RETRY%ns%points", properties=properties, j=2, l=1)
    assert answer.code == ResultCode.SUCCESS, answer.remark
    dead = (await client.get("/dead-letters")).json()["items"]
    assert [one["subscription"] for one in dead] == ["ns.points@ns.order"]
    await peer.close()
    await other.close()


async def test_a_lock_of_a_group_ends(
    peer: RemotingPeer, gateway: tuple[RemotingGateway, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeys(None, None)
    assert not gateway[0].clients.is_locked("points", keys)
    assert (await locked(peer))[0] == ResultCode.SUCCESS
    assert gateway[0].clients.is_locked("points", keys)
    assert not gateway[0].clients.is_locked("points", ApiKeys("hn_other", "hn_other"))
    assert not gateway[0].clients.is_locked("mailer", keys)
    monkeypatch.setattr(remoting_clients, "LOCK_S", -1.0)
    assert (await locked(peer))[0] == ResultCode.SUCCESS
    assert not gateway[0].clients.is_locked("points", keys)


def client_made_id() -> str:
    """An id in the form of Apache's client, made now."""
    now = datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return f"7F000001123418B4AAC2{(now - month) // timedelta(milliseconds=1):08X}0001"


@pytest.mark.parametrize("unique_key", [client_made_id, lambda: "chosen-by-the-shop"], ids=["client", "other"])
async def test_a_received_message_that_is_sent_on_is_another_message(
    peer: RemotingPeer, db: Connection, unique_key: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ids of another form get the time of the request, in steps: all of this test is in one.
    now = datetime.now(UTC)
    monkeypatch.setattr(storing, "step_of", lambda _: now)
    await sent(peer, b"a", UNIQ_KEY=unique_key(), KEYS="order-1030", shop="s1")
    for number in range(2):
        [message] = await pulled_again(peer, number)
        # A handler sends it on, and the client repeats a send whose answer it did not get.
        for _ in range(2):
            await sent(peer, b"a", **message.properties, DELAY="1")
        await peer.commit(number + 1)
        stored = await db.fetchval("select count(*) from half")
        assert (stored, await receipts(db)) == (number + 2, number + 1)
    # Another producer sends it on as well.
    [message] = await pulled_again(peer, 2)
    answer = await peer.send(b"a", group="retrier", properties={**message.properties, "DELAY": "1"})
    assert answer.code == ResultCode.SUCCESS, answer.remark
    headers = {row[0] for row in await db.fetch("select headers from half")}
    assert (await db.fetchval("select count(*) from half"), len(headers)) == (4, 1)


async def committed(peer: RemotingPeer, body: bytes) -> None:
    """Send a message in a transaction, and commit it."""
    half = await peer.send(body, f=4, properties={"TRAN_MSG": "true", "PGROUP": "shop", "TAGS": "created"})
    end = {
        "producerGroup": "shop",
        "tranStateTableOffset": half.fields["queueOffset"],
        "commitLogOffset": int(half.fields["msgId"][16:], 16),
        "commitOrRollback": 8,
        "fromTransactionCheck": "false",
        "msgId": half.fields["transactionId"],
    }
    assert (await peer.call(RequestCode.END_TRANSACTION, end)).code == ResultCode.SUCCESS


@pytest.mark.parametrize("how", ["send", "batch"])
async def test_a_received_message_of_a_transaction_that_is_sent_on_is_a_message(
    peer: RemotingPeer, db: Connection, how: str
) -> None:
    await committed(peer, b"a")
    [message] = await pulled_again(peer, 0)
    # Of it the client makes the transaction id of the handler, and the flag of a half if the handler sends it on.
    assert message.properties["TRAN_MSG"] == "true"
    assert not {"PGROUP", "REAL_TOPIC", "REAL_QID"} & message.properties.keys()
    if how == "send":
        sent_on = await peer.send(b"a", f=4, properties=message.properties)
    else:
        properties = properties_text(message.properties).encode()
        part = bytes(16) + (1).to_bytes(4, "big") + b"a" + len(properties).to_bytes(2, "big") + properties
        sent_on = await peer.send(part, code=RequestCode.SEND_BATCH_MESSAGE, m="true")
    assert sent_on.code == ResultCode.SUCCESS, sent_on.remark
    [again] = await pulled_again(peer, 1)
    assert (again.body, again.unique_key) == (b"a", message.unique_key)
    assert "TRAN_MSG" not in again.properties
    assert await db.fetchval("select count(*) from half left join op using (transaction_id) where op is null") == 0


async def test_a_received_message_that_is_sent_on_in_a_transaction_is_a_half(
    peer: RemotingPeer, db: Connection
) -> None:
    await committed(peer, b"a")
    [message] = await pulled_again(peer, 0)
    answer = await peer.send(b"a", f=4, properties={**message.properties, "PGROUP": "shop"})
    assert answer.code == ResultCode.SUCCESS, answer.remark
    assert await db.fetchval("select count(*) from half left join op using (transaction_id) where op is null") == 1


async def test_a_client_that_leaves_gives_back_what_it_holds(
    peer: RemotingPeer, gateway: tuple[RemotingGateway, int]
) -> None:
    await sent(peer, b"a")
    assert len(await pulled(peer, 0)) == 1
    left = {"clientID": peer.client_id, "consumerGroup": "points"}
    assert (await peer.call(RequestCode.UNREGISTER_CLIENT, left)).code == ResultCode.SUCCESS
    assert (await peer.pull(1)).code == ResultCode.SUBSCRIPTION_NOT_EXIST
    other = await RemotingPeer.connect(gateway[1])
    await joined(other)
    async with asyncio.timeout(30):
        while not (messages := await pulled(other, 0)):
            await asyncio.sleep(0.05)
    assert [one.body for one in messages] == [b"a"]
    await other.close()


async def test_a_client_that_comes_back_has_what_it_held(
    peer: RemotingPeer, gateway: tuple[RemotingGateway, int], db: Connection
) -> None:
    await sent(peer, b"a")
    assert len(await pulled(peer, 0)) == 1
    renewals = gateway[0].renewals
    [held] = renewals._held.values()
    other = await RemotingPeer.connect(gateway[1])
    other.client_id, other.origin = peer.client_id, peer.origin
    await peer.close()
    async with asyncio.timeout(30):
        while gateway[0].clients.get(held.client_id, held.keys) is not None:
            await asyncio.sleep(0.01)
    # It comes back with its next heartbeat, later than the next look.
    until = held.until
    await renewals.renew(until - 15)
    assert held.until == until
    # No request is answered before the client says who it is.
    assert (await other.pull(1)).code == ResultCode.SUBSCRIPTION_NOT_EXIST
    await other.heartbeat(consumers={"points": "*"})
    await renewals.renew(until - 10)
    assert [one.until for one in renewals._held.values()] == [until - 10 + HELD_S]
    await other.commit(1)
    assert await receipts(db) == 1
    assert len(renewals) == 0
    await other.close()


async def test_a_client_takes_no_more_than_it_works_on(peer: RemotingPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "HELD_MAX", 2)
    await sent(peer, b"a", b"b", b"c")
    assert len(await pulled(peer, 0)) == 2
    assert await pulled(peer, 2) == []
    assert [one.body for one in await pulled(peer, 2, commitOffset=1)] == [b"c"]


async def test_each_client_learns_of_itself_only(peer: RemotingPeer, gateway: tuple[RemotingGateway, int]) -> None:
    assert (await peer.asked.get()).fields == {"consumerGroup": "points"}
    other = await RemotingPeer.connect(gateway[1])
    listed = {"consumerGroup": "points"}
    assert (await other.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, listed)).code == ResultCode.SUBSCRIPTION_NOT_EXIST
    await joined(other)
    for one in (peer, other):
        answer = await one.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, listed)
        assert json.loads(answer.body) == {"consumerIdList": [one.client_id]}
    await other.close()


async def test_the_subscription_filters_and_begins_as_the_client_says(
    gateway: tuple[RemotingGateway, int], client: httpx.AsyncClient
) -> None:
    peer = await RemotingPeer.connect(gateway[1])
    await sent(peer, b"before")
    await peer.heartbeat(consumers={"points": "created || paid"}, consumeFromWhere="CONSUME_FROM_FIRST_OFFSET")
    shape = (await client.get(f"/subscriptions/{NAME}")).json()
    assert shape["filters"] == {"tags": ["created", "paid"], "headers": None}
    await peer.heartbeat(consumers={"points": "*"})
    assert (await client.get(f"/subscriptions/{NAME}")).json()["filters"] is None
    peer.origin = await began(peer)
    assert [one.body for one in await pulled(peer, 0)] == [b"before"]
    check = {"subscriptionData": {"topic": "order", "subString": "amount > 3", "expressionType": "SQL92"}}
    answer = await peer.call(RequestCode.CHECK_CLIENT_CONFIG, body=json.dumps(check).encode())
    assert answer.code == ResultCode.SUBSCRIPTION_PARSE_FAILED
    await peer.close()


async def test_nothing_is_pulled_by_a_filter_that_the_client_gave_up(client: httpx.AsyncClient) -> None:
    served = client._transport
    assert isinstance(served, httpx.AsyncBaseTransport)
    service = RefusingService(served)
    async with remoting_over(service) as (_, port):
        peer = await RemotingPeer.connect(port)
        await peer.heartbeat(consumers={"points": "created"})
        peer.origin = await began(peer)
        service.methods = {"PATCH"}
        assert (await peer.heartbeat(consumers={"points": "paid"})).code == ResultCode.SUCCESS
        await sent(peer, b"paid", TAGS="paid")
        # The former filter would pass over it for good.
        answer = await peer.pull(0)
        assert (answer.code, answer.remark) == (ResultCode.SYSTEM_BUSY, OVERLOADED["title"])
        service.methods.clear()
        assert [one.body for one in await pulled(peer, 0)] == [b"paid"]
        assert (await client.get(f"/subscriptions/{NAME}")).json()["filters"]["tags"] == ["paid"]
        asked = len(service.asked)
        assert await pulled(peer, 1) == []
        assert [action for action, _ in service.asked[asked:]] == ["claim"]
        await peer.close()


async def offset_asked(peer: RemotingPeer, **fields: Any) -> int:
    asked = {"consumerGroup": "points", "topic": "order", "queueId": 0, **fields}
    return (await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, asked)).code


async def test_an_offset_is_told_to_a_member_of_the_group_only(
    peer: RemotingPeer, gateway: tuple[RemotingGateway, int]
) -> None:
    assert await offset_asked(peer) == ResultCode.SUCCESS
    assert await offset_asked(peer, consumerGroup="mailer") == ResultCode.SUBSCRIPTION_NOT_EXIST
    assert await offset_asked(peer, topic="billing") == ResultCode.SUBSCRIPTION_PARSE_FAILED
    for queue_id in (-1, 4, 2**31 - 1):
        assert await offset_asked(peer, queueId=queue_id) == ResultCode.SYSTEM_ERROR
    [client] = gateway[0].clients._by_name.values()
    assert list(client._queues) == [("points", "order", 0)]
    await peer.heartbeat(consumers={"news": "*"}, messageModel="BROADCASTING")
    assert await offset_asked(peer, consumerGroup="news") == ResultCode.NO_PERMISSION


async def test_an_offset_is_told_only_with_the_right_to_the_subscription(start: Any) -> None:
    _, admin = await start()
    key = (await made(admin, "subscriber", subscriptions=["points@*"], topics=["order"]))["key"]
    async with remoting_over(admin._transport, Credentials(None, ApiKeys(None, key))) as (gateway, port):
        peer = await RemotingPeer.connect(port)
        assert (await peer.heartbeat(consumers={"points": "*", "mailer": "*"})).code == ResultCode.SUCCESS
        assert await offset_asked(peer) == ResultCode.SUCCESS
        assert await offset_asked(peer, consumerGroup="mailer") == ResultCode.NO_PERMISSION
        [client] = gateway.clients._by_name.values()
        assert list(client._queues) == [("points", "order", 0)]
        await peer.close()


async def test_what_halfnote_does_not_have_is_refused(peer: RemotingPeer) -> None:
    assert (await peer.pull(0, queueId=4)).code == ResultCode.SYSTEM_ERROR
    assert (await peer.pull(0, queueOffset=-1)).code == ResultCode.SYSTEM_ERROR
    assert (await peer.pull(0, topic="billing")).code == ResultCode.SUBSCRIPTION_PARSE_FAILED
    assert (await peer.pull(0, group="mailer")).code == ResultCode.SUBSCRIPTION_NOT_EXIST
    await peer.heartbeat(consumers={"news": "*"}, messageModel="BROADCASTING")
    assert (await peer.pull(0, group="news")).code == ResultCode.NO_PERMISSION
    assert await pulled(peer, 0, topic="%RETRY%points") == []
