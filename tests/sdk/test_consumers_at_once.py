"""Consumers whose handlers run at once: what they claim, the order of keys, and that each message is settled once."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from halfnote import Consumer, Outgoing, SyncConsumer, SyncTransactionProducer
from halfnote import consumer as consumer_module
from halfnote import sync_consumer as sync_consumer_module
from halfnote.inbox import Reject
from halfnote.message import Message
from halfnote.queues import Queue, Queues
from halfnote.testing import Coordinator
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sdk.coordinators import problem
from tests.sdk.pulled import ACK, CLAIM, EXTEND, NACK, URL, claimed, scripted

# For a busy machine.
SOON_S = 50.0
KINDS = pytest.mark.parametrize("kind", [Consumer, SyncConsumer])
Handle = Callable[[Any, Message], None]


async def ran(
    kind: type[Consumer | SyncConsumer], transport: Any, handle: Handle, *, at_once: int, **options: Any
) -> None:
    """Run a consumer whose handlers call `handle(consumer, message)` on threads, until that stops it."""
    if kind is SyncConsumer:

        def on_a_thread() -> None:
            with SyncConsumer(URL, "worker", transport=transport, wait_s=0.1, **options) as consumer:
                consumer.run(lambda message: handle(consumer, message), at_once=at_once)

        await asyncio.wait_for(asyncio.to_thread(on_a_thread), SOON_S)
        return

    async def on_the_loop() -> None:
        async with Consumer(URL, "worker", transport=transport, **options) as consumer:

            async def handler(message: Message) -> None:
                await asyncio.to_thread(handle, consumer, message)

            await consumer.run(handler, at_once=at_once)

    await asyncio.wait_for(on_the_loop(), SOON_S)


def waiting(claims: Callable[[], httpx.Response]) -> Callable[[httpx.Request], httpx.Response]:
    """Return answers of a coordinator, of which a claim that finds nothing waits for a moment."""
    coordinator = scripted()

    def answers(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/claim"):
            return coordinator.transport().handle_request(request)
        found = claims()
        if not json.loads(found.content).get("messages"):
            time.sleep(0.01)
        return found

    return answers


@KINDS
async def test_a_handler_that_hangs_keeps_no_other_message_back(kind: type[Consumer | SyncConsumer]) -> None:
    """The service hands out 4 messages a claim."""
    claims = iter([claimed(1, 2, 3, 4), claimed(5, 6, 7, 8), claimed(9, 10, 11, 12)])
    goes_on = threading.Event()
    handled: list[Any] = []

    def handle(consumer: Any, message: Message) -> None:
        if message.json() == 1:
            assert goes_on.wait(SOON_S)
            consumer.stop()
        handled.append(message.json())
        if len(handled) == 11:
            goes_on.set()

    transport = httpx.MockTransport(waiting(lambda: next(claims, None) or claimed()))
    await ran(kind, transport, handle, at_once=2)
    assert sorted(handled[:11]) == list(range(2, 13))
    assert handled[11:] == [1]


@KINDS
async def test_as_many_handlers_run_as_were_asked_for_whatever_a_claim_has(
    kind: type[Consumer | SyncConsumer],
) -> None:
    claims = iter([claimed(1, 2), claimed(3, 4), claimed(5, 6)])
    together = threading.Barrier(6)

    def handle(consumer: Any, message: Message) -> None:
        together.wait(SOON_S)
        consumer.stop()

    await ran(kind, httpx.MockTransport(waiting(lambda: next(claims, None) or claimed())), handle, at_once=6)
    assert not together.broken


@KINDS
async def test_a_later_claim_s_messages_of_a_key_under_way_wait_for_it(
    kind: type[Consumer | SyncConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are held for longer meanwhile; after a failure they are given back."""
    for module in (consumer_module, sync_consumer_module):
        monkeypatch.setattr(module, "EXTENDED_AFTER", 0.02)
    claims = iter([claimed(1, key="a"), claimed(2, key="a"), claimed(3, key="b")])
    coordinator = scripted(lambda _: next(claims, None) or claimed())
    handled: list[Any] = []

    def handle(consumer: Any, message: Message) -> None:
        handled.append(message.json())
        if message.json() == 1:
            began = time.monotonic()
            while not any({"h1", "h2"} <= set(one["handles"]) for one in coordinator.asked(EXTEND)) or 3 not in handled:
                assert time.monotonic() - began < SOON_S
                time.sleep(0.01)
            consumer.stop()
            raise ValueError("no paper")

    await ran(kind, coordinator.transport(), handle, at_once=2, invisible_s=30.0)
    assert handled == [1, 3]
    back = [(one["handles"], one.get("begun", True)) for one in coordinator.asked(NACK)]
    assert back == [(["h1"], True), (["h2"], False)]
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h3"]]


@KINDS
async def test_a_key_under_way_hoards_no_more_than_two_claims(kind: type[Consumer | SyncConsumer]) -> None:
    """What waits is given back by each failure. The service has as many messages of the key as are asked for."""
    numbers, goes_on = iter(range(1, 1000)), threading.Event()
    claims: list[int] = []
    coordinator = scripted()

    def answers(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/claim"):
            return coordinator.transport().handle_request(request)
        claims.append(1)
        if len(claims) > 2:
            goes_on.set()
        return claimed(*(next(numbers) for _ in range(10)), key="a")

    def handle(consumer: Any, message: Message) -> None:
        # A claim too many would come at once.
        goes_on.wait(0.3)
        consumer.stop()

    await ran(kind, httpx.MockTransport(answers), handle, at_once=50)
    assert len(claims) == 2


@KINDS
async def test_messages_without_a_key_do_not_wait_for_each_other(kind: type[Consumer | SyncConsumer]) -> None:
    """A claim has as many as may wait."""
    claims = iter([claimed(1, 2, 3), claimed(4, 5, 6)])
    together = threading.Barrier(6)

    def handle(consumer: Any, message: Message) -> None:
        together.wait(SOON_S)
        consumer.stop()

    await ran(kind, httpx.MockTransport(waiting(lambda: next(claims, None) or claimed())), handle, at_once=6, at_most=3)
    assert not together.broken


@KINDS
async def test_a_claim_that_is_refused_ends_a_run_after_its_handlers(kind: type[Consumer | SyncConsumer]) -> None:
    refused = threading.Event()

    def refuses(_: httpx.Request) -> httpx.Response:
        refused.set()
        return problem(404, "subscription-unknown")

    coordinator = scripted(claimed(1), refuses)

    def handle(consumer: Any, message: Message) -> None:
        assert refused.wait(SOON_S)
        time.sleep(0.1)

    with pytest.raises(Exception, match="subscription-unknown"):
        await ran(kind, coordinator.transport(), handle, at_once=2)
    assert [one["handles"] for one in coordinator.asked(ACK)] == [["h1"]]


@KINDS
@pytest.mark.parametrize("act", ["claim", "ack", "nack"])
async def test_an_answer_that_no_service_gives_cancels_no_handler(
    kind: type[Consumer | SyncConsumer], act: str
) -> None:
    """A claim so answered is tried again; what was to be settled comes again."""
    coordinator = scripted(claimed(1, 2), claimed())
    is_answered = threading.Event()

    def answers(request: httpx.Request) -> httpx.Response:
        is_odd = request.url.path.endswith(f"/{act}") and (act != "claim" or coordinator.asked(CLAIM))
        if not is_odd or is_answered.is_set():
            return coordinator.transport().handle_request(request)
        is_answered.set()
        return httpx.Response(200, json={})

    def handle(consumer: Any, message: Message) -> None:
        if message.json() == 2:
            if act == "nack":
                raise ValueError("no paper")
            return
        assert is_answered.wait(SOON_S)
        time.sleep(0.1)
        consumer.stop()

    running = ran(kind, httpx.MockTransport(answers), handle, at_once=2)
    await running
    assert ["h1"] in [one["handles"] for one in coordinator.asked(ACK)]
    assert not any("h1" in one["handles"] for one in coordinator.asked(NACK))


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("is_down", [False, True])
def test_a_handler_that_ends_the_program_ends_a_run_though_claims_find_nothing(at_once: int, is_down: bool) -> None:
    claims, empty = iter([claimed(1)]), threading.Event()

    def next_claim() -> httpx.Response:
        if (found := next(claims, None)) is not None:
            return found
        empty.set()
        return problem(503, "draining") if is_down else claimed()

    def handle(message: Message) -> None:
        assert at_once == 1 or empty.wait(SOON_S)
        time.sleep(0.1)
        raise SystemExit(3)

    came: list[BaseException] = []
    consumer = SyncConsumer(URL, "worker", transport=httpx.MockTransport(waiting(next_claim)), wait_s=0.1)

    def runs() -> None:
        try:
            consumer.run(handle, at_once=at_once)
        except BaseException as error:
            came.append(error)

    thread = threading.Thread(target=runs, daemon=True)
    thread.start()
    thread.join(SOON_S)
    has_ended = not thread.is_alive()
    consumer.close()
    assert has_ended
    assert [type(error) for error in came] == [SystemExit]


@KINDS
@pytest.mark.parametrize("at_once", [0, -1])
async def test_no_handler_at_all_is_refused(kind: type[Consumer | SyncConsumer], at_once: int) -> None:
    coordinator = scripted(claimed())
    with pytest.raises(ValueError, match="at_once"):
        await ran(kind, coordinator.transport(), lambda *_: None, at_once=at_once)


@KINDS
@pytest.mark.parametrize("ordered", ["key", "none"])
async def test_each_message_is_settled_once_and_those_of_a_key_in_their_order(
    kind: type[Consumer | SyncConsumer], ordered: str
) -> None:
    """Some handlers fail at first, and some reject; the coordinator in memory hands out again what was given back."""
    made = Coordinator("shop")
    transport = made.transport()
    with httpx.Client(base_url=URL, transport=transport) as client:
        put = {"topics": ["order"], "destination": {"type": "pull"}, "ordered": ordered}
        assert client.put("/subscriptions/worker", json=put).status_code == 201
    with SyncTransactionProducer(URL, group="shop", transport=transport) as producer:
        producer.send_plain([Outgoing("order", n, key=f"k{n % 7}" if n % 3 else None) for n in range(60)])
    lock = threading.Lock()
    working: Counter[str | None] = Counter()
    done: list[tuple[str | None, int]] = []

    def handle(consumer: Any, message: Message) -> None:
        number = message.json()
        with lock:
            working[message.key] += 1
            assert message.key is None or working[message.key] == 1
        time.sleep(0.002 * (number % 5))
        with lock:
            working[message.key] -= 1
            if number % 11 == 5 and message.attempt == 1:
                raise ValueError("no paper")
            done.append((message.key, number))
            if len(done) == 60:
                consumer.stop()
        if number % 13 == 7:
            raise Reject("no address")

    await ran(kind, transport, handle, at_once=4, at_most=5)
    assert sorted(number for _, number in done) == list(range(60))
    pulled = made.subscriptions["worker"]
    settled = [message.json() for message in (*pulled.acknowledged, *pulled.dead)]
    assert sorted(settled) == list(range(60))
    if ordered == "key":
        for key in {key for key, _ in done if key is not None}:
            of_key = [number for one, number in done if one == key]
            assert of_key == sorted(of_key)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=5)),
    st.integers(1, 3),
    st.integers(1, 10),
    st.data(),
)
def test_queues_hand_out_each_message_once_and_those_of_a_key_one_after_the_other(
    claims: list[list[str | None]], at_once: int, at_most: int, data: st.DataObject
) -> None:
    queues = Queues(at_once, at_most)
    under_way: list[Queue] = []
    begun: list[Queue] = []
    given_out: list[int] = []
    number = 0
    keys: dict[int, str | None] = {}
    for claim in [*claims, []]:
        held = []
        for key in claim:
            number += 1
            keys[number] = key
            held.append(Held(number, key))
        under_way += queues.add(held)  # type: ignore[arg-type]
        of_keys = [queue.key for queue in under_way if queue.key is not None]
        assert len(of_keys) == len(set(of_keys))
        waiting = sum(len(one.messages) - (one not in begun) for one in under_way)
        assert queues.have_room() == (len(under_way) < at_once and waiting < at_most)
        is_last = not claim and under_way
        for _ in range(1000 if is_last else data.draw(st.integers(0, 4))):
            if not under_way:
                break
            queue = data.draw(st.sampled_from(under_way)) if not is_last else under_way[0]
            one: Any = queues.next(queue)
            begun.append(queue)
            if one is None:
                under_way.remove(queue)
            else:
                given_out.append(one.number)
    while under_way:
        given_out += [one.number for one in queues.end(under_way.pop())]  # type: ignore[attr-defined]
    assert sorted(given_out) == list(range(1, number + 1))
    for key in ("a", "b", "c"):
        of_key = [one for one in given_out if keys[one] == key]
        assert of_key == sorted(of_key)


class Held:
    """A claimed message with a number."""

    def __init__(self, number: int, key: str | None) -> None:
        self.number, self.message = number, self
        self.key = key
