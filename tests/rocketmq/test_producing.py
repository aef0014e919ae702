"""Messages, halves and ends by RocketMQ's protocol, over the service in process."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
from structlog.testing import capture_logs

from app.database.connection import Connection
from app.rocketmq import checks
from app.rocketmq.clients import ConnectedClient
from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.protocol.definition_pb2 import (
    COMMIT,
    DELAY,
    ROLLBACK,
    SOURCE_SERVER_CHECK,
    TRANSACTION,
    TRANSACTION_RESOLUTION_UNSPECIFIED,
    Endpoints,
    Message,
    Resource,
)
from app.rocketmq.protocol.service_pb2 import (
    EndTransactionRequest,
    HeartbeatRequest,
    NotifyClientTerminationRequest,
    PullMessageRequest,
    PullMessageResponse,
    QueryAssignmentRequest,
    QueryRouteRequest,
    RecallMessageRequest,
    SendMessageRequest,
)
from app.rocketmq.service import SERVICE
from app.runtime.state import Runtime
from app.store.checkback.requests import ask_now
from tests.support.gateway import RocketClient, codes_of, gateway_over, message_of, producer_of
from tests.support.keyed_services import made, start
from tests.support.refusing_service import RefusingService

__all__ = ["start"]


@pytest.fixture
async def rocket(client: httpx.AsyncClient) -> AsyncIterator[RocketClient]:
    """A client of a gateway over the service in process."""
    async with gateway_over(client._transport) as (_, channel):
        yield RocketClient(channel)


def version_1(at: datetime, number: int = 0) -> str:
    """Return an id as Apache's clients make it."""
    seconds = int((at - datetime(2021, 1, 1, tzinfo=UTC)).total_seconds())
    return f"0156F7E71C361B21BC{seconds:08X}{number:08X}"


async def sent(rocket: RocketClient, *messages: Message) -> Any:
    return await rocket.call("SendMessage", SendMessageRequest(messages=messages))


async def half(rocket: RocketClient, body: bytes = b"order 1030", **system: Any) -> Any:
    answer = await sent(rocket, message_of("order", body, message_type=TRANSACTION, **system))
    assert codes_of([answer, *answer.entries]) == ["OK", "OK"], answer
    return answer.entries[0]


async def ended(rocket: RocketClient, transaction_id: str, resolution: int, **fields: Any) -> str:
    request = EndTransactionRequest(
        topic=Resource(name="order"), transaction_id=transaction_id, resolution=resolution, **fields
    )
    return codes_of([await rocket.call("EndTransaction", request)])[0]


async def stored(db: Connection) -> list[tuple[str, int | None]]:
    found = await db.fetch("select h.transaction_id, o.verdict from half h left join op o using (transaction_id)")
    return [(str(row[0]), row[1]) for row in found]


async def test_a_transaction_is_committed_and_another_rolled_back(rocket: RocketClient, db: Connection) -> None:
    first, second = await half(rocket), await half(rocket)
    assert first.message_id != second.message_id
    assert await ended(rocket, first.transaction_id, COMMIT) == "OK"
    assert await ended(rocket, first.transaction_id, COMMIT) == "OK"
    assert await ended(rocket, second.transaction_id, ROLLBACK) == "OK"
    assert await ended(rocket, second.transaction_id, COMMIT) == "INVALID_TRANSACTION_ID"
    assert sorted(await stored(db)) == sorted([(first.transaction_id, 1), (second.transaction_id, 2)])


async def test_unknown_changes_nothing_whoever_says_it(rocket: RocketClient, db: Connection) -> None:
    entry = await half(rocket)
    for fields in ({}, {"source": SOURCE_SERVER_CHECK}):
        said = await ended(rocket, entry.transaction_id, TRANSACTION_RESOLUTION_UNSPECIFIED, **fields)
        assert said == "OK"
    assert await stored(db) == [(entry.transaction_id, None)]


@pytest.mark.parametrize("resolution", [TRANSACTION_RESOLUTION_UNSPECIFIED, COMMIT])
async def test_an_answer_to_a_check_that_was_refused_for_now_is_still_one(
    client: httpx.AsyncClient, runtime: Runtime, resolution: int
) -> None:
    served = client._transport
    assert isinstance(served, httpx.AsyncBaseTransport)
    service = RefusingService(served)
    group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
    assert (await client.put("/producer-groups/order", json=group)).status_code == 201
    async with gateway_over(service) as (gateway, channel):
        rocket = RocketClient(channel)
        entry = await half(rocket)
        async with runtime.database.connection() as connection:
            assert await ask_now(connection, UUID(entry.transaction_id), runtime.clock.now())
        stream, _ = await rocket.connect(producer_of("order"))
        async with asyncio.timeout(60):
            await stream.read()
        # An end that names another topic is no answer to the check.
        unknown = EndTransactionRequest(topic=Resource(name="billing"), transaction_id=entry.transaction_id)
        assert codes_of([await rocket.call("EndTransaction", unknown)]) == ["OK"]
        assert len(gateway.checks) == 1
        # A client in Go does not say of what its ends are.
        service.whole = {"end"}
        assert await ended(rocket, entry.transaction_id, resolution) == "TOO_MANY_REQUESTS"
        service.whole.clear()
        assert await ended(rocket, entry.transaction_id, resolution) == "OK"
        assert len(gateway.checks) == 0
        ends = [wanted for action, wanted in service.asked if action == "end"]
        assert [one["from_check"] for one in ends] == [True, True]
        # The next one is no answer any more.
        assert await ended(rocket, entry.transaction_id, TRANSACTION_RESOLUTION_UNSPECIFIED) == "OK"
        assert [action for action, _ in service.asked].count("end") == 2
        stream.cancel()


@pytest.mark.parametrize("ends", [False, True], ids=["it reads", "it leaves"])
async def test_the_next_checks_are_claimed_when_a_producer_has_taken_those_before(
    client: httpx.AsyncClient, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(checks, "CHECKS_MAX", 1)
    served = client._transport
    assert isinstance(served, httpx.AsyncBaseTransport)
    service = RefusingService(served)
    group = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
    assert (await client.put("/producer-groups/order", json=group)).status_code == 201
    async with gateway_over(service) as (gateway, channel):
        for number in range(2):
            entry = await half(RocketClient(channel), bytes([number]))
            async with runtime.database.connection() as connection:
                assert await ask_now(connection, UUID(entry.transaction_id), runtime.clock.now())
        producer = ConnectedClient("slow", ApiKeys(None, None))
        producer.topics = {"order": Resource(name="order")}
        gateway.clients.add(producer)
        async with asyncio.timeout(60):
            first = await producer.next_command()
            # A claim would begin at once.
            for _ in range(100):
                await asyncio.sleep(0)
            assert [action for action, _ in service.asked].count("claim") == 1
            if ends:
                producer.left(broke=True)
            else:
                producer.taken()
            second = await producer.next_command()
        asked = [one.recover_orphaned_transaction_command.message.body for one in (first, second) if one is not None]
        assert sorted(asked) == [b"\0", b"\1"]


@pytest.mark.parametrize("transaction_id", ["", "order-1030", "019a9f1c-1030-7b1e-8f00-1030a1030a10"])
async def test_an_end_of_no_transaction_is_refused(rocket: RocketClient, transaction_id: str) -> None:
    assert await ended(rocket, transaction_id, COMMIT) == "INVALID_TRANSACTION_ID"


# The test reads the clock, because the processes of a run must collect the same parameters.
@pytest.mark.parametrize("message_id", ["", "chosen-by-the-shop", version_1(datetime(2022, 1, 1, tzinfo=UTC))])
async def test_a_repeated_send_is_one_transaction(rocket: RocketClient, db: Connection, message_id: str) -> None:
    message_id = message_id or version_1(datetime.now(UTC))
    first, again = [await half(rocket, message_id=message_id, keys=["b", "a"]) for _ in range(2)]
    assert (first.transaction_id, first.message_id) == (again.transaction_id, message_id)
    assert len(await stored(db)) == 1
    other = await half(rocket, b"order 1031", message_id=message_id)
    assert other.transaction_id != first.transaction_id
    assert await ended(rocket, first.transaction_id, COMMIT) == "OK"
    assert await half(rocket, message_id=message_id, keys=["b", "a"]) == first


async def test_a_repeated_send_with_a_delay_is_one_message(rocket: RocketClient, db: Connection) -> None:
    made = message_of("order", b"later", version_1(datetime.now(UTC)), message_type=DELAY)
    made.system_properties.delivery_timestamp.FromDatetime(datetime.now(UTC) + timedelta(minutes=5))
    for _ in range(2):
        answer = await sent(rocket, made)
        assert codes_of([answer, *answer.entries]) == ["OK", "OK"]
    [row] = await db.fetch("select deliver_after_s from half")
    assert 290 < row[0] <= 300


async def test_each_message_of_a_request_has_its_own_outcome(rocket: RocketClient, db: Connection) -> None:
    heavy = message_of("order", b"heavy", user_properties={"note": "n" * 9000})
    answer = await sent(rocket, message_of("order", b"light"), heavy)
    assert codes_of([answer, *answer.entries]) == ["MULTIPLE_RESULTS", "OK", "MESSAGE_PROPERTIES_TOO_LARGE"]
    assert await db.fetchval("select count(*) from half") == 1
    answer = await sent(rocket, message_of("order", b"a"), message_of("billing", b"b"))
    assert codes_of([answer]) == ["MESSAGE_CORRUPTED"]
    assert codes_of([await sent(rocket)]) == ["MESSAGE_CORRUPTED"]
    assert await db.fetchval("select count(*) from half") == 1


async def test_the_first_message_of_a_topic_declares_its_producer_group(
    rocket: RocketClient, client: httpx.AsyncClient
) -> None:
    assert (await client.get("/producer-groups/order")).status_code == 404
    assert codes_of([await sent(rocket, message_of("order", b"x"))]) == ["OK"]
    group = (await client.get("/producer-groups/order")).json()
    assert (group["checks"], group["check_urls"]) == ("claim", [])


async def test_a_group_that_an_operator_declared_stays_as_it_is(
    rocket: RocketClient, client: httpx.AsyncClient
) -> None:
    shape = {"check_urls": ["http://127.0.0.1:9/"], "interval_s": 77}
    assert (await client.put("/producer-groups/order", json=shape)).status_code == 201
    assert codes_of([await sent(rocket, message_of("order", b"x"))]) == ["OK"]
    group = (await client.get("/producer-groups/order")).json()
    assert (group["checks"], group["interval_s"]) == ("call", 77)


async def test_a_client_that_may_not_declare_the_group_reads_who_has_to(start: Any) -> None:
    _, admin = await start()
    key = (await made(admin, "producer", producer_groups=["order"], topics=["order"]))["key"]
    async with gateway_over(admin._transport, Credentials(None, ApiKeys(key, None))) as (_, channel):
        rocket = RocketClient(channel)
        answer = await sent(rocket, message_of("order", b"x"))
        assert codes_of([answer]) == ["TOPIC_NOT_FOUND"]
        assert "halfnote groups put order --checks claim" in answer.status.message
        assert (await admin.put("/producer-groups/order", json={"checks": "claim"})).status_code == 201
        assert codes_of([await sent(rocket, message_of("order", b"x"))]) == ["OK"]
        assert codes_of([await sent(rocket, message_of("billing", b"x"))]) == ["FORBIDDEN"]
    async with gateway_over(admin._transport, Credentials(None, ApiKeys("hn_" + "x" * 43, None))) as (_, channel):
        assert codes_of([await sent(RocketClient(channel), message_of("order", b"x"))]) == ["UNAUTHORIZED"]


async def test_without_the_service_the_answer_says_so_and_later_calls_succeed(client: httpx.AsyncClient) -> None:
    served = client._transport

    class Interrupted(httpx.AsyncBaseTransport):
        down = True

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if self.down:
                raise httpx.ConnectError("refused", request=request)
            return await served.handle_async_request(request)

    transport = Interrupted()
    async with gateway_over(transport) as (_, channel):
        rocket = RocketClient(channel)
        answer = await sent(rocket, message_of("order", b"x"))
        assert codes_of([answer]) == ["PROXY_TIMEOUT"]
        assert answer.status.message == "Halfnote does not answer: refused."
        stream, settings = await rocket.connect(producer_of("order"))
        assert settings.publishing.max_body_size == 3_000_000
        transport.down = False
        assert codes_of([await sent(rocket, message_of("order", b"x"))]) == ["OK"]
        stream.cancel()


async def test_a_client_reads_what_failed_and_not_where_the_service_is() -> None:
    class Silent(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise httpx.ReadTimeout("", request=request)

    with capture_logs() as logged:
        async with gateway_over(Silent(), url="http://operator:secret@halfnote.internal:8080") as (_, channel):
            for _ in range(2):
                answer = await sent(RocketClient(channel), message_of("order", b"x"))
                assert codes_of([answer]) == ["PROXY_TIMEOUT"]
                assert answer.status.message == "Halfnote does not answer: ReadTimeout."
    away = [one for one in logged if one["event"] == "rocketmq_halfnote_away"]
    assert [(one["url"], one["error"]) for one in away] == [("http://halfnote.internal:8080", "ReadTimeout")]
    assert "secret" not in str(logged)


async def test_a_producer_gets_its_settings_and_is_known_until_it_leaves(rocket: RocketClient) -> None:
    assert codes_of([await rocket.call("Heartbeat", HeartbeatRequest())]) == ["UNRECOGNIZED_CLIENT_TYPE"]
    stream, settings = await rocket.connect(producer_of("order"))
    assert settings.publishing.validate_message_type
    assert settings.backoff_policy.max_attempts == 3
    assert not settings.metric.on
    assert codes_of([await rocket.call("Heartbeat", HeartbeatRequest())]) == ["OK"]
    left = NotifyClientTerminationRequest()
    assert codes_of([await rocket.call("NotifyClientTermination", left)]) == ["OK"]
    assert codes_of([await rocket.call("NotifyClientTermination", left)]) == ["UNRECOGNIZED_CLIENT_TYPE"]
    stream.cancel()


async def test_routes_lead_back_to_where_the_client_came_from(rocket: RocketClient) -> None:
    came = Endpoints(scheme=1)
    came.addresses.add(host="10.0.0.1", port=8081)
    topic = Resource(name="order")
    route = await rocket.call("QueryRoute", QueryRouteRequest(topic=topic, endpoints=came))
    [queue] = route.message_queues
    assert (queue.broker.endpoints, queue.topic, queue.id) == (came, topic, 0)
    assert list(queue.accept_message_types) == [1, 2, 3, 4]
    group = Resource(name="points")
    assigned = await rocket.call("QueryAssignment", QueryAssignmentRequest(topic=topic, group=group, endpoints=came))
    assert [one.message_queue.id for one in assigned.assignments] == [-1]
    nowhere = await rocket.call("QueryRoute", QueryRouteRequest(topic=topic))
    assert codes_of([nowhere]) == ["ILLEGAL_ACCESS_POINT"]
    illegal = QueryRouteRequest(topic=Resource(name="a b"), endpoints=came)
    assert codes_of([await rocket.call("QueryRoute", illegal)]) == ["ILLEGAL_TOPIC"]


async def test_what_halfnote_does_not_have_is_not_implemented(rocket: RocketClient) -> None:
    recall = RecallMessageRequest(topic=Resource(name="order"), recall_handle="x")
    assert codes_of([await rocket.call("RecallMessage", recall)]) == ["NOT_IMPLEMENTED"]
    pull = PullMessageRequest()
    method = rocket._channel.unary_stream(
        f"/{SERVICE}/PullMessage", PullMessageRequest.SerializeToString, PullMessageResponse.FromString
    )
    assert codes_of([one async for one in method(pull, metadata=rocket.metadata)]) == ["NOT_IMPLEMENTED"]


async def test_a_call_without_a_client_id_is_refused(rocket: RocketClient) -> None:
    rocket._metadata["x-mq-client-id"] = ""
    assert codes_of([await sent(rocket, message_of("order", b"x"))]) == ["CLIENT_ID_REQUIRED"]
