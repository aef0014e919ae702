"""Claims, acknowledgements and dead letters by RocketMQ's protocol, over the service in process."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from app.database.connection import Connection
from app.rocketmq import answer_sizes, consuming, renewals
from app.rocketmq.calls import ClientCall
from app.rocketmq.claiming import Claiming
from app.rocketmq.credentials import ApiKeys, Credentials
from app.rocketmq.protocol.definition_pb2 import (
    DELAY,
    FIFO,
    NORMAL,
    PUSH_CONSUMER,
    SQL,
    Code,
    Message,
    Resource,
    Settings,
)
from app.rocketmq.protocol.service_pb2 import (
    AckMessageEntry,
    AckMessageRequest,
    ChangeInvisibleDurationRequest,
    ForwardMessageToDeadLetterQueueRequest,
    SendMessageRequest,
    TelemetryCommand,
)
from app.rocketmq.subscriptions import Subscriptions
from app.runtime.state import Runtime
from tests.conftest import assembled, client_of, settings_of
from tests.support.consumers import lapse, sweep_after
from tests.support.gateway import (
    GatewayInProcess,
    RocketClient,
    codes_of,
    consumer_of,
    gateway_over,
    message_of,
    receive_of,
)
from tests.support.keyed_services import made, start
from tests.support.refusing_service import RefusingService

__all__ = ["start"]

NAME = "points@order"
OK, MESSAGE_NOT_FOUND = 20000, 40401
# Until when the service holds what was renewed.
LEASED_UNTIL = "select max(leased_until) from delivery_retry"


@pytest.fixture
async def gateway(client: httpx.AsyncClient) -> AsyncIterator[tuple[GatewayInProcess, grpc.aio.Channel]]:
    async with gateway_over(client._transport) as both:
        yield both


@pytest.fixture
async def rocket(gateway: tuple[GatewayInProcess, grpc.aio.Channel]) -> AsyncIterator[RocketClient]:
    """A connected simple consumer of the group `points` and the topic `order`."""
    rocket = RocketClient(gateway[1])
    stream, _ = await rocket.connect(consumer_of("points", "order"))
    yield rocket
    stream.cancel()


async def sent(rocket: RocketClient, *messages: Message) -> None:
    answer = await rocket.call("SendMessage", SendMessageRequest(messages=messages))
    assert codes_of([answer]) == ["OK"], answer


async def received(rocket: RocketClient, **fields: Any) -> list[Message]:
    code, messages = await rocket.receive(receive_of("points", "order", **fields))
    assert code == (OK if messages else MESSAGE_NOT_FOUND)
    return messages


async def acked(rocket: RocketClient, *handles: str, group: str = "points") -> list[str]:
    request = AckMessageRequest(
        group=Resource(name=group),
        topic=Resource(name="order"),
        entries=[AckMessageEntry(message_id="m", receipt_handle=handle) for handle in handles],
    )
    answer = await rocket.call("AckMessage", request)
    return codes_of([answer, *answer.entries])


async def left(parts: GatewayInProcess, rocket: RocketClient) -> None:
    """Wait until the gateway notices that a client's stream has ended."""
    async with asyncio.timeout(30):
        while parts.clients.get(rocket.client_id, ApiKeys(None, None)) is not None:
            await asyncio.sleep(0.01)


def handle_of(message: Message) -> str:
    return message.system_properties.receipt_handle


async def changed(rocket: RocketClient, handle: str, seconds: float) -> Any:
    request = ChangeInvisibleDurationRequest(
        group=Resource(name="points"), topic=Resource(name="order"), receipt_handle=handle
    )
    request.invisible_duration.FromMilliseconds(round(seconds * 1000))
    return await rocket.call("ChangeInvisibleDuration", request)


async def test_a_message_is_received_and_acknowledged(rocket: RocketClient, db: Connection) -> None:
    assert await received(rocket) == []
    given = message_of("order", b"order 1030", tag="created", keys=["a", "b"], user_properties={"shop": "s1"})
    await sent(rocket, given)
    [message] = await received(rocket)
    system = message.system_properties
    assert (message.body, system.message_id) == (b"order 1030", given.system_properties.message_id)
    assert (system.tag, list(system.keys), dict(message.user_properties)) == ("created", ["a", "b"], {"shop": "s1"})
    assert (system.delivery_attempt, system.invisible_duration.seconds) == (1, 30)
    assert await received(rocket) == []
    assert await acked(rocket, handle_of(message)) == ["OK", "OK"]
    assert await acked(rocket, handle_of(message)) == ["OK", "OK"]
    assert await db.fetchval("select count(*) from receipt") == 1


async def test_what_is_not_acknowledged_in_time_comes_again(
    rocket: RocketClient, db: Connection, runtime: Runtime
) -> None:
    await sent(rocket, message_of("order", b"x"))
    [first] = await received(rocket)
    await lapse(db, runtime)
    assert await acked(rocket, handle_of(first)) == ["INVALID_RECEIPT_HANDLE"] * 2
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    [again] = await received(rocket)
    assert again.system_properties.delivery_attempt == 2
    assert again.system_properties.message_id == first.system_properties.message_id
    assert await acked(rocket, handle_of(first), handle_of(again)) == [
        "MULTIPLE_RESULTS",
        "INVALID_RECEIPT_HANDLE",
        "OK",
    ]


@pytest.mark.parametrize("handle", ["", "x", "AQAAAAcAAAAA" + "A" * 128, "h" * 600])
async def test_a_handle_of_no_message_is_refused(rocket: RocketClient, handle: str) -> None:
    assert set(await acked(rocket, handle)) == {"INVALID_RECEIPT_HANDLE"}
    assert codes_of([await changed(rocket, handle, 20)]) == ["INVALID_RECEIPT_HANDLE"]


async def test_a_handle_of_another_group_is_refused(rocket: RocketClient) -> None:
    other = RocketClient(rocket._channel)
    stream, _ = await other.connect(consumer_of("mailer", "order"))
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket)
    assert await acked(other, handle_of(message), group="mailer") == ["INVALID_RECEIPT_HANDLE"] * 2
    assert await acked(rocket, handle_of(message)) == ["OK", "OK"]
    stream.cancel()


async def test_the_group_is_a_subscription_that_filters_as_the_last_client_says(
    rocket: RocketClient, client: httpx.AsyncClient
) -> None:
    shape = (await client.get(f"/subscriptions/{NAME}")).json()
    assert (shape["topics"], shape["filters"], shape["destination"]) == (["order"], None, {"type": "pull"})
    await received(rocket, expression="paid || created")
    assert (await client.get(f"/subscriptions/{NAME}")).json()["filters"] == {
        "tags": ["created", "paid"],
        "headers": None,
    }
    await sent(rocket, message_of("order", b"no", tag="shipped"), message_of("order", b"yes", tag="paid"))
    assert [one.body for one in await received(rocket, expression="paid || created")] == [b"yes"]
    other = RocketClient(rocket._channel)
    settings = consumer_of("points", "order", "region = 'eu'")
    settings.subscription.subscriptions[0].expression.type = SQL
    stream, _ = await other.connect(settings)
    assert (await client.get(f"/subscriptions/{NAME}")).json()["filters"] == {"tags": None, "headers": {"region": "eu"}}
    await sent(rocket, message_of("order", b"us", user_properties={"region": "us"}))
    await sent(rocket, message_of("order", b"eu", user_properties={"region": "eu"}))
    assert [one.body for one in await received(rocket, expression="paid || created")] == [b"eu"]
    stream.cancel()


async def test_the_last_client_decides_the_filter_whatever_another_gateway_saw_before(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], client: httpx.AsyncClient
) -> None:
    here, there = Subscriptions(gateway[0].api), Subscriptions(gateway[0].api)
    keys = ApiKeys(None, None)
    for gateway_of_client, tag in ((here, "b"), (there, "a"), (here, "b")):
        await gateway_of_client.filter_by(NAME, "order", keys, {"tags": [tag]})
        assert (await client.get(f"/subscriptions/{NAME}")).json()["filters"]["tags"] == [tag]
    await here.order_by_key(NAME, "order", keys, {"tags": ["b"]})
    assert (await client.patch(f"/subscriptions/{NAME}", json={"ordered": "none"})).status_code == 200
    await here.order_by_key(NAME, "order", keys, {"tags": ["b"]})
    assert (await client.get(f"/subscriptions/{NAME}")).json()["ordered"] == "key"


async def test_a_poll_does_not_read_the_subscription_again(client: httpx.AsyncClient) -> None:
    served = client._transport
    assert isinstance(served, httpx.AsyncBaseTransport)
    service = RefusingService(served)
    async with gateway_over(service) as (_, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order"))
        asked = len(service.asked)
        for _ in range(3):
            assert await received(rocket) == []
        assert [action for action, _ in service.asked[asked:]] == ["claim"] * 3
        stream.cancel()


async def test_a_filter_that_halfnote_cannot_do_is_refused(rocket: RocketClient) -> None:
    request = receive_of("points", "order", expression="amount > 3")
    request.filter_expression.type = SQL
    code, _ = await rocket.receive(request)
    assert code == 40010
    settings = consumer_of("points", "order", "amount > 3")
    settings.subscription.subscriptions[0].expression.type = SQL
    await refused_stream(rocket, settings)


async def refused_stream(rocket: RocketClient, settings: Settings) -> None:
    stream = RocketClient(rocket._channel).telemetry()
    await stream.write(TelemetryCommand(settings=settings))
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.read()
    assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_settings_of_neither_kind_end_the_stream(rocket: RocketClient) -> None:
    await refused_stream(rocket, Settings())
    await refused_stream(rocket, consumer_of("a b", "order"))


@pytest.mark.parametrize(("seconds", "code"), [(9.9, 40011), (43_201, 40011), (10, MESSAGE_NOT_FOUND)])
async def test_the_time_of_a_message_has_rocketmqs_limits(rocket: RocketClient, seconds: float, code: int) -> None:
    assert (await rocket.receive(receive_of("points", "order", invisible_s=seconds)))[0] == code


async def test_a_simple_consumer_holds_a_message_for_longer(
    rocket: RocketClient, db: Connection, runtime: Runtime
) -> None:
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket)
    answer = await changed(rocket, handle_of(message), 300)
    assert (codes_of([answer]), answer.receipt_handle) == (["OK"], handle_of(message))
    await sweep_after(runtime, 60)
    assert await acked(rocket, handle_of(message)) == ["OK", "OK"]
    assert codes_of([await changed(rocket, handle_of(message), 300)]) == ["INVALID_RECEIPT_HANDLE"]
    assert codes_of([await changed(rocket, handle_of(message), 43_201)]) == ["ILLEGAL_INVISIBLE_TIME"]


async def test_a_push_consumer_gives_a_message_back_as_a_failed_attempt(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], db: Connection
) -> None:
    rocket = RocketClient(gateway[1])
    stream, settings = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    assert settings.backoff_policy.max_attempts == 17
    assert [one.seconds for one in settings.backoff_policy.customized_backoff.next][:3] == [10, 30, 60]
    assert settings.subscription.receive_batch_size == 32
    assert not settings.subscription.fifo
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket, auto_renew=True)
    assert message.system_properties.invisible_duration.seconds == 60
    assert codes_of([await changed(rocket, handle_of(message), 10)]) == ["OK"]
    # A failed attempt at once, and not a message that is held for ten more seconds.
    assert await db.fetchval("select count(*) from attempt where kind = 'delivery'") == 1
    assert await acked(rocket, handle_of(message)) == ["INVALID_RECEIPT_HANDLE"] * 2
    stream.cancel()


async def test_a_push_consumer_whose_stream_is_broken_gives_a_message_back(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], db: Connection
) -> None:
    parts, channel = gateway
    rocket = RocketClient(channel)
    settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
    stream, _ = await rocket.connect(settings)
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket, auto_renew=True)
    held = parts.renewals._held[handle_of(message)]
    stream.cancel()
    await left(parts, rocket)
    assert codes_of([await changed(rocket, handle_of(message), 10)]) == ["OK"]
    assert await db.fetchval("select count(*) from attempt where kind = 'delivery'") == 1
    stream, _ = await rocket.connect(settings)
    await parts.renewals.renew(held.until - 10)
    assert len(parts.renewals) == 0
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    [again] = await received(rocket, auto_renew=True)
    assert again.system_properties.delivery_attempt == 2
    stream.cancel()


async def test_messages_of_a_push_consumer_are_renewed_while_it_is_connected(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], db: Connection, runtime: Runtime
) -> None:
    parts, channel = gateway
    rocket = RocketClient(channel)
    stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    await sent(rocket, message_of("order", b"x"), message_of("order", b"y"))
    first, second = await received(rocket, auto_renew=True)
    assert await acked(rocket, handle_of(first)) == ["OK", "OK"]
    assert list(parts.renewals._held) == [handle_of(second)]
    due_at = time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1
    await parts.renewals.renew(due_at)
    held = parts.renewals._held[handle_of(second)]
    assert held.until == due_at + renewals.HELD_S
    stream.cancel()
    await left(parts, rocket)
    # The client is away, and may come back. Nothing is renewed meanwhile, and what lapses is forgotten.
    leased_until = await db.fetchval(LEASED_UNTIL)
    assert leased_until is not None
    await parts.renewals.renew(held.until - 10)
    assert (held.until, await db.fetchval(LEASED_UNTIL)) == (due_at + renewals.HELD_S, leased_until)
    await parts.renewals.renew(held.until + 1)
    assert parts.renewals._held == {}
    assert await db.fetchval(LEASED_UNTIL) == leased_until
    await lapse(db, runtime)
    assert await acked(rocket, handle_of(second)) == ["INVALID_RECEIPT_HANDLE"] * 2


class Hanging(httpx.AsyncBaseTransport):
    """Halfnote, with some paths that get no answer before `goes_on`. `answered`: the paths of answered requests."""

    def __init__(self, inner: httpx.AsyncBaseTransport, *paths: str) -> None:
        self._inner, self._paths = inner, paths
        self.goes_on, self.answered = asyncio.Event(), list[str]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in self._paths:
            await self.goes_on.wait()
        answer = await self._inner.handle_async_request(request)
        self.answered.append(request.url.path)
        return answer


@pytest.mark.parametrize("at_once", [16, 2])
async def test_a_renewal_that_gets_no_answer_holds_up_no_other(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(renewals, "AT_ONCE", at_once)
    halfnote = Hanging(client._transport, "/subscriptions/g0@order/extend")
    async with gateway_over(halfnote) as (parts, channel):
        streams = []
        for number in range(4):
            rocket = RocketClient(channel)
            settings = consumer_of(f"g{number}", "order", client_type=PUSH_CONSUMER)
            streams.append((await rocket.connect(settings))[0])
            await sent(rocket, message_of("order", b"x"))
            code, messages = await rocket.receive(receive_of(f"g{number}", "order", auto_renew=True))
            assert (code, len(messages)) == (OK, 1)
        due_at = time.monotonic() + renewals.HELD_S - renewals.AHEAD_S + 1
        renewing = asyncio.create_task(parts.renewals.renew(due_at))
        renewed = {f"/subscriptions/g{number}@order/extend" for number in (1, 2, 3)}
        async with asyncio.timeout(60):
            while not renewed <= set(halfnote.answered):
                await asyncio.sleep(0.01)
        assert not renewing.done()
        halfnote.goes_on.set()
        await renewing
        assert min(one.until for one in parts.renewals._held.values()) >= due_at + renewals.HELD_S
        for stream in streams:
            stream.cancel()


async def test_what_a_push_consumer_holds_is_renewed_when_it_comes_back(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The connection goes on for long enough after the answer, so that the answer has surely arrived.
    monkeypatch.setattr(renewals, "BREAK_NOTICED_S", 0.0)
    parts, channel = gateway
    rocket = RocketClient(channel)
    settings = consumer_of("points", "order", client_type=PUSH_CONSUMER)
    stream, _ = await rocket.connect(settings)
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket, auto_renew=True)
    held = parts.renewals._held[handle_of(message)]
    stream.cancel()
    await left(parts, rocket)
    await parts.renewals.renew(held.until - 15)
    stream, _ = await rocket.connect(settings)
    assert await db.fetchval(LEASED_UNTIL) is None
    back_at = held.until - 10
    await parts.renewals.renew(back_at)
    assert parts.renewals._held == {handle_of(message): held}
    assert held.until == back_at + renewals.HELD_S
    assert await db.fetchval(LEASED_UNTIL) is not None
    # However long it is connected, it ends.
    await parts.renewals.renew(held.since + renewals.RENEWED_MOST_S + 1)
    assert parts.renewals._held == {}
    stream.cancel()


async def test_after_an_answer_that_broke_the_next_one_has_one_message_and_later_ones_more(
    client: httpx.AsyncClient,
) -> None:
    served = client._transport
    assert isinstance(served, httpx.AsyncBaseTransport)
    service = RefusingService(served)
    async with gateway_over(service) as (parts, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order"))
        await sent(rocket, *(message_of("order", bytes([number])) for number in range(64)))
        subscriptions = Subscriptions(parts.api)
        gateway_side = consuming.Consuming(
            Claiming(parts.api, subscriptions), parts.clients, subscriptions, parts.renewals
        )

        async def read(most: int, client_id: str = rocket.client_id) -> None:
            """Read up to `most` answers of one Receive. The client is gone then, as at its deadline."""
            call = ClientCall(client_id, ApiKeys(None, None), None)
            async with aclosing(gateway_side.receive(receive_of("points", "order"), call)) as answers:
                async for _ in answers:
                    most -= 1
                    if not most:
                        return

        for most in (3, 40, 40, 1, 40, 40):
            await read(most)
        # Another client is not concerned.
        await read(40, "other")
        claims = [wanted["max"] for action, wanted in service.asked if action == "claim"]
        first = answer_sizes.FIRST_BATCH_MAX
        assert claims == [first, 1, 2, 4, 1, 2, first]
        stream.cancel()


async def test_an_answer_brings_few_large_messages(rocket: RocketClient) -> None:
    large = answer_sizes.BATCH_BYTES // 2
    for number in range(12):
        await sent(rocket, message_of("order", bytes([number]) * large))
    assert len(await received(rocket)) == answer_sizes.FIRST_BATCH_MAX
    assert len(await received(rocket)) == 2


def test_sizes_are_kept_of_so_many_clients() -> None:
    sizes, keys = answer_sizes.AnswerSizes(), ApiKeys(None, None)
    first = sizes.of("0", keys, NAME)
    for number in range(1, answer_sizes.KEPT_MAX):
        sizes.of(f"{number}", keys, NAME)
    assert sizes.of("0", keys, NAME) is first
    second = sizes.of("1", keys, NAME)
    sizes.of("last", keys, NAME)
    assert (sizes.of("0", keys, NAME), sizes.of("1", keys, NAME)) == (first, second)
    assert len(sizes._kept) == answer_sizes.KEPT_MAX


@pytest.mark.parametrize(("read", "lapsing"), [(3, 1), (5, 3)])
async def test_messages_of_an_answer_that_breaks_are_not_renewed(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel],
    db: Connection,
    runtime: Runtime,
    read: int,
    lapsing: int,
) -> None:
    parts, channel = gateway
    rocket = RocketClient(channel)
    stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    await sent(rocket, *(message_of("order", body) for body in (b"1", b"2", b"3")))
    subscriptions = Subscriptions(parts.api)
    gateway_side = consuming.Consuming(Claiming(parts.api, subscriptions), parts.clients, subscriptions, parts.renewals)
    call = ClientCall(rocket.client_id, ApiKeys(None, None), None)
    answers = gateway_side.receive(receive_of("points", "order", auto_renew=True), call)
    # A status and two messages; or all of them, and the end as well, whose arrival is not certain.
    bodies = [one.message.body for one in [await anext(answers) for _ in range(read)] if one.HasField("message")]
    assert len(parts.renewals) == 3
    await answers.aclose()
    assert len(parts.renewals) == 0
    again: set[bytes] = set()
    async with asyncio.timeout(30):
        while len(again) < 3 - lapsing:
            again |= {one.body for one in await received(rocket)}
    assert again == {b"1", b"2", b"3"} - set(bodies[:lapsing])
    # What was written comes when its time is over. Of the last one read, that is not certain.
    assert await received(rocket) == []
    await lapse(db, runtime)
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    assert {one.body for one in await received(rocket)} == {b"1", b"2", b"3"}
    stream.cancel()


async def test_messages_are_claimed_and_renewed_within_what_halfnote_allows(dsn: str, db: Connection) -> None:
    held_s = "select extract(epoch from held_until - claimed_at)::float from pull_claim order by claim_id"
    limited = settings_of(dsn, claim_max=3, claim_held_max_s=20)
    async with (
        assembled(limited, dsn) as runtime,
        client_of(runtime) as client,
        gateway_over(client._transport) as (parts, channel),
    ):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        await sent(rocket, *(message_of("order", b"x") for _ in range(4)))
        # 60 and 30 s are refused, and so are 32, 16, 8 and 4 messages.
        messages = await received(rocket, auto_renew=True)
        assert [one.system_properties.invisible_duration.seconds for one in messages] == [15] * 2
        messages += await received(rocket, auto_renew=True, batch_size=1)
        assert [row[0] for row in await db.fetch(held_s)] == [15, 15]
        now = time.monotonic()
        await parts.renewals.renew(now)
        assert {one.until for one in parts.renewals._held.values()} == {now + 15}
        assert set(await acked(rocket, *map(handle_of, messages))) == {"OK"}
        # What a client asks for itself is refused.
        code, _ = await rocket.receive(receive_of("points", "order", invisible_s=21))
        assert code == Code.ILLEGAL_INVISIBLE_TIME
        assert len(await received(rocket, invisible_s=20)) == 1
        stream.cancel()


async def test_a_time_that_is_too_short_to_renew_is_refused(dsn: str) -> None:
    async with (
        assembled(settings_of(dsn, claim_held_max_s=7), dsn) as runtime,
        client_of(runtime) as client,
        gateway_over(client._transport) as (_, channel),
    ):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        code, _ = await rocket.receive(receive_of("points", "order", auto_renew=True))
        assert code == Code.ILLEGAL_INVISIBLE_TIME
        stream.cancel()


async def test_a_client_gives_up_and_the_message_is_a_dead_letter(
    rocket: RocketClient, client: httpx.AsyncClient
) -> None:
    await sent(rocket, message_of("order", b"x"))
    [message] = await received(rocket)
    request = ForwardMessageToDeadLetterQueueRequest(
        group=Resource(name="points"),
        topic=Resource(name="order"),
        receipt_handle=handle_of(message),
        delivery_attempt=17,
        max_delivery_attempts=17,
    )
    assert codes_of([await rocket.call("ForwardMessageToDeadLetterQueue", request)]) == ["OK"]
    [dead] = (await client.get("/dead-letters", params={"subscription": NAME})).json()["items"]
    assert "attempt 17 of 17" in str(dead)
    assert codes_of([await rocket.call("ForwardMessageToDeadLetterQueue", request)]) == ["INVALID_RECEIPT_HANDLE"]


async def test_messages_of_other_producers_are_received(rocket: RocketClient, client: httpx.AsyncClient) -> None:
    assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
    message = {"topic": "order", "key": "order-1030", "headers": {"region": "eu"}, "body": {"order": 1030}}
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": [message]})
    [one] = await received(rocket)
    assert (one.body, list(one.system_properties.keys)) == (b'{"order":1030}', ["order-1030"])
    assert one.system_properties.message_id == answer.json()["messages"][0]["message_id"]
    assert dict(one.user_properties) == {"region": "eu"}


@pytest.mark.parametrize("due", ["99999999999999999999", "9" * 4000, "9" * 5000, "253402300800000", "-1", "tomorrow"])
async def test_a_time_of_delivery_that_is_none_stops_no_receive(
    rocket: RocketClient, client: httpx.AsyncClient, due: str
) -> None:
    assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
    messages = [{"topic": "order", "body": {"order": 1}, "headers": {"rocketmq-delivery-timestamp": due}}]
    messages.append({"topic": "order", "body": {"order": 2}})
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": messages})
    assert answer.status_code == 201, answer.text
    found = await received(rocket)
    assert [one.body for one in found] == [b'{"order":1}', b'{"order":2}']
    assert [one.system_properties.HasField("delivery_timestamp") for one in found] == [False, False]
    assert [one.system_properties.message_type for one in found] == [NORMAL, NORMAL]


@pytest.mark.parametrize("value", ['{"a": "\\ud800"}', '["\\ud800"]', "[" * 3500, "no json", "7"])
async def test_headers_of_the_gateway_that_others_set_stop_no_receive(
    rocket: RocketClient, client: httpx.AsyncClient, value: str
) -> None:
    assert (await client.put("/producer-groups/shop", json={"checks": "claim"})).status_code == 201
    headers = {"rocketmq-keys": value, "rocketmq-properties": value, "region": "eu"}
    message = {"topic": "order", "key": "order-1030", "headers": headers, "body": {"order": 1030}}
    answer = await client.post("/messages", json={"producer_group": "shop", "messages": [message]})
    assert answer.status_code == 201, answer.text
    [one] = await received(rocket)
    assert (one.body, list(one.system_properties.keys)) == (b'{"order":1030}', ["order-1030"])
    assert dict(one.user_properties) == {"region": "eu"}


async def test_delay_and_message_group_come_back(rocket: RocketClient, db: Connection) -> None:
    delayed = message_of("order", b"later", message_type=DELAY)
    delayed.system_properties.delivery_timestamp.FromSeconds(round(time.time()) + 3600)
    await sent(rocket, delayed, message_of("order", b"grouped", message_type=FIFO, message_group="g1", keys=["k"]))
    [grouped] = await received(rocket)
    assert (grouped.system_properties.message_group, list(grouped.system_properties.keys)) == ("g1", ["k"])
    assert grouped.system_properties.message_type == FIFO
    assert await db.fetchval("select count(*) from half where key = 'g1'") == 1
    await db.execute("update outbox set due_at = now() - interval '1 second' where due_at is not null")
    await db.execute("update delivery_retry set due_at = now() - interval '1 second'")
    [later] = await received(rocket)
    assert later.system_properties.message_type == DELAY
    assert later.system_properties.delivery_timestamp == delayed.system_properties.delivery_timestamp


async def test_message_groups_are_received_in_order_from_an_ordered_subscription(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], client: httpx.AsyncClient
) -> None:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
    assert (await client.put(f"/subscriptions/{NAME}", json=put)).status_code == 201
    rocket = RocketClient(gateway[1])
    stream, settings = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
    assert settings.subscription.fifo
    for group, body in (("g1", b"1"), ("g1", b"2"), ("g2", b"3"), ("g1", b"4")):
        await sent(rocket, message_of("order", body, message_type=FIFO, message_group=group))
    [first] = await received(rocket, batch_size=1)
    assert first.body == b"1"
    # What follows in the group of a message that is out stays until that is settled.
    assert [one.body for one in await received(rocket)] == [b"3"]
    assert await acked(rocket, handle_of(first)) == ["OK", "OK"]
    assert [one.body for one in await received(rocket)] == [b"2", b"4"]
    stream.cancel()


async def test_a_client_for_go_gets_the_messages_of_an_ordered_subscription_one_by_one(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], client: httpx.AsyncClient
) -> None:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
    assert (await client.put(f"/subscriptions/{NAME}", json=put)).status_code == 201
    rocket = RocketClient(gateway[1], **{"x-mq-language": "GO"})
    for group, body in (("g1", b"1"), ("g1", b"2"), ("g2", b"3")):
        await sent(rocket, message_of("order", body, message_type=FIFO, message_group=group))
    [first] = await received(rocket)
    assert [first.body, *(one.body for one in await received(rocket))] == [b"1", b"3"]
    assert await received(rocket) == []
    assert await acked(rocket, handle_of(first)) == ["OK", "OK"]
    assert [one.body for one in await received(rocket)] == [b"2"]


class SometimesAway(httpx.AsyncBaseTransport):
    """Halfnote, or no answer while `away`."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner, self.away = inner, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            raise httpx.ConnectError("away", request=request)
        return await self._inner.handle_async_request(request)


async def test_a_push_consumer_that_was_not_told_of_the_order_gets_messages_one_by_one(
    client: httpx.AsyncClient,
) -> None:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
    assert (await client.put(f"/subscriptions/{NAME}", json=put)).status_code == 201
    halfnote = SometimesAway(client._transport)
    async with gateway_over(halfnote) as (_, channel):
        rocket = RocketClient(channel)
        halfnote.away = True
        stream, settings = await rocket.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        assert not settings.subscription.fifo
        halfnote.away = False
        for group, body in (("g1", b"1"), ("g1", b"2"), ("g2", b"3")):
            await sent(rocket, message_of("order", body, message_type=FIFO, message_group=group))
        # The client repeats its settings, but has chosen how it calls its handler.
        await stream.write(TelemetryCommand(settings=consumer_of("points", "order", client_type=PUSH_CONSUMER)))
        assert (await stream.read()).settings.subscription.fifo
        [first] = await received(rocket, auto_renew=True)
        assert [first.body, *(one.body for one in await received(rocket, auto_renew=True))] == [b"1", b"3"]
        assert await received(rocket, auto_renew=True) == []
        assert await acked(rocket, handle_of(first)) == ["OK", "OK"]
        assert [one.body for one in await received(rocket, auto_renew=True)] == [b"2"]
        # One that was told gets several, and so does a simple consumer, whose owner decides.
        told = RocketClient(channel)
        second, settings = await told.connect(consumer_of("points", "order", client_type=PUSH_CONSUMER))
        assert settings.subscription.fifo
        for body in (b"4", b"5"):
            await sent(rocket, message_of("order", body, message_type=FIFO, message_group="g3"))
        assert [one.body for one in await received(told, auto_renew=True)] == [b"4", b"5"]
        for body in (b"6", b"7"):
            await sent(rocket, message_of("order", body, message_type=FIFO, message_group="g4"))
        assert [one.body for one in await received(RocketClient(channel))] == [b"6", b"7"]
        stream.cancel()
        second.cancel()


@pytest.mark.parametrize("topics", [("order", "billing"), ("billing", "order")])
async def test_a_consumer_of_several_topics_is_ordered_if_one_of_them_is(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], client: httpx.AsyncClient, topics: tuple[str, str]
) -> None:
    put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": "key"}
    assert (await client.put(f"/subscriptions/{NAME}", json=put)).status_code == 201
    asked = consumer_of("points", topics[0], client_type=PUSH_CONSUMER)
    asked.subscription.subscriptions.extend(consumer_of("points", topics[1]).subscription.subscriptions)
    stream, settings = await RocketClient(gateway[1]).connect(asked)
    assert settings.subscription.fifo
    stream.cancel()


async def test_a_subscription_with_another_destination_is_not_taken_over(
    gateway: tuple[GatewayInProcess, grpc.aio.Channel], client: httpx.AsyncClient
) -> None:
    put = {"topics": ["order"], "destination": {"type": "webhook", "url": "http://127.0.0.1:9/"}}
    assert (await client.put(f"/subscriptions/{NAME}", json=put)).status_code == 201
    rocket = RocketClient(gateway[1])
    stream, _ = await rocket.connect(consumer_of("points", "order"))
    assert (await rocket.receive(receive_of("points", "order")))[0] == 40403
    stream.cancel()


async def test_a_subscribers_key_declares_what_is_in_its_scope(start: Any) -> None:
    _, admin = await start()
    key = (await made(admin, "subscriber", subscriptions=["points@*"], topics=["order"]))["key"]
    async with gateway_over(admin._transport, Credentials(None, ApiKeys(None, key))) as (_, channel):
        rocket = RocketClient(channel)
        stream, _ = await rocket.connect(consumer_of("points", "order"))
        assert (await rocket.receive(receive_of("points", "order")))[0] == MESSAGE_NOT_FOUND
        assert (await rocket.receive(receive_of("mailer", "order")))[0] == 40300
        assert (await rocket.receive(receive_of("points", "billing")))[0] == 40300
        stream.cancel()


async def test_of_messages_that_a_client_does_not_read_only_the_one_under_way_uses_up_an_attempt(
    rocket: RocketClient, db: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sent(rocket, message_of("order", b"x" * 1000))
    await sent(rocket, message_of("order", b"y" * 1000))

    def broken(*_: Any) -> Message:
        raise RuntimeError("the client is gone")

    monkeypatch.setattr(consuming, "delivered", broken)
    _, messages = await rocket.receive(receive_of("points", "order"))
    assert messages == []
    monkeypatch.undo()
    async with asyncio.timeout(30):
        again: list[Message] = []
        while len(again) < 2:
            again += await received(rocket)
    attempts = {one.body[:1]: one.system_properties.delivery_attempt for one in again}
    assert attempts == {b"x": 2, b"y": 1}
