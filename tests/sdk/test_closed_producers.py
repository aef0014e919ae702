"""After `close` a producer has no thread, task or connection left, and says which ends it has left to check-back."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from halfnote import (
    COMMIT,
    ROLLBACK,
    Outgoing,
    ProducerClosed,
    SyncTransactionProducer,
    Transaction,
    TransactionProducer,
    Verdict,
)
from halfnote.ids import new_id

from tests.sdk.coordinators import Scripted, answer

ORDER = Outgoing("order", {"order": 1030})
ATTEMPT_S = 1.0
KINDS = pytest.mark.parametrize("kind", [TransactionProducer, SyncTransactionProducer])
# For a busy machine.
SOON_S = 50.0
CLAIM = "/producer-groups/shop/checks/claim"
CHECKS = {
    "checks": [
        {
            "type": "halfnote.check",
            "transaction_id": "019a9f1c-1030-7b1e-8f00-1030a1030a10",
            "handle": "2-7",
            "producer_group": "shop",
            "check": 2,
            "max_checks": 15,
            "born_at": "2026-11-21T08:00:00Z",
            "context": None,
            "messages": [],
        }
    ]
}


class Service:
    """Takes halves over real connections, once `takes`, and gives ends no answer, until `answers`."""

    def __init__(self) -> None:
        self.answers, self.ended, self.asked = threading.Event(), threading.Event(), list[str]()
        # The ids of the ends that were answered.
        self.recorded = list[str]()
        self.takes = threading.Event()
        self.takes.set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers["content-length"])))
                service.asked.append(self.path)
                if self.path == "/half":
                    assert service.takes.wait(SOON_S)
                    with suppress(OSError):
                        self._answer(201, b'{"created": true}')
                    return
                while not (service.answers.is_set() or service.ended.wait(0.01)):
                    pass
                outcomes = [{"status": 200} for _ in content.get("ends", [])]
                service.recorded += [one["transaction_id"] for one in content.get("ends", [content])]
                # The client may be gone.
                with suppress(OSError):
                    self._answer(200, json.dumps({"outcomes": outcomes}).encode())

            def _answer(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def ends(self) -> int:
        """Return how many requests with ends have come."""
        return sum(path in ("/end", "/ends") for path in self.asked)

    def stop(self) -> None:
        """Stop serving."""
        self.ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.stop()


def ending(service: Service, count: int, attempt_s: float = ATTEMPT_S, **options: Any) -> SyncTransactionProducer:
    """Return a producer with so many ends in the background, of which the first is under way."""
    producer = SyncTransactionProducer(service.url, group="shop", attempt_s=attempt_s, wait_for_end=False, **options)
    for number in range(count):
        with producer.transaction(ORDER):
            pass
        while number == 0 and not service.ends():
            time.sleep(0.01)
    return producer


@pytest.fixture
def before() -> set[threading.Thread]:
    """The threads that other tests left."""
    return {*threading.enumerate()}


def of_producers(before: set[threading.Thread]) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("halfnote") and one not in before]


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("grace_s", [0.0, 0.2, 2 * ATTEMPT_S])
def test_no_thread_is_left_while_the_service_gives_no_answer(
    service: Service, caplog: pytest.LogCaptureFixture, before: set[threading.Thread], grace_s: float, batching: bool
) -> None:
    producer = ending(service, 3, batching=batching)
    began = time.monotonic()
    producer.close(grace_s)
    # For a busy machine.
    assert time.monotonic() - began < max(grace_s, ATTEMPT_S) + 1
    assert of_producers(before) == []
    asked = service.ends()
    time.sleep(ATTEMPT_S)
    assert service.ends() == asked
    warnings = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert sum(int(text.split()[0]) for text in warnings if "left to check-back" in text) == 3


def test_what_waits_is_sent_in_one_request_before_the_close_ends(
    service: Service, caplog: pytest.LogCaptureFixture, before: set[threading.Thread]
) -> None:
    # An attempt that ends before all 20 transactions are made would be repeated.
    producer = ending(service, 20, SOON_S)
    service.answers.set()
    producer.close()
    assert of_producers(before) == []
    assert [path for path in service.asked if path != "/half"] == ["/end", "/ends"]
    assert "left to check-back" not in caplog.text


def left_of(caplog: pytest.LogCaptureFixture) -> list[int]:
    """Return the number of transactions in each line about what is left to check-back."""
    texts = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert not any("\n" in text for text in texts)
    return [int(text.split()[0]) for text in texts if "left to check-back, so Halfnote asks" in text]


class Either:
    """A producer of either kind for code that awaits; that of threads does its work on threads."""

    def __init__(self, kind: type[Any], url: str = "http://localhost", **options: Any) -> None:
        self.is_sync = kind is SyncTransactionProducer
        self.producer: Any = kind(url, group="shop", attempt_s=ATTEMPT_S, **options)

    async def call(self, name: str, *given: Any) -> Any:
        """Call a method of the producer."""
        function = getattr(self.producer, name)
        return await (asyncio.to_thread(function, *given) if self.is_sync else function(*given))

    async def block(self, inside: "Callable[[], Any]" = lambda: None) -> Any:
        """Run a block around `inside`, which may be awaitable; return its result."""
        if self.is_sync:

            def on_a_thread() -> Any:
                with self.producer.transaction(ORDER) as tx:
                    inside()
                return tx.result

            return await asyncio.to_thread(on_a_thread)
        async with self.producer.transaction(ORDER) as tx:
            if (waits := inside()) is not None:
                await waits
        return tx.result


async def until(condition: Callable[[], Any]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < SOON_S
        await asyncio.sleep(0.01)


@KINDS
@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("of_lists", [True, False])
async def test_one_line_says_how_many_transactions_are_left(
    kind: type[Any], batching: bool, of_lists: bool, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    made = Either(kind, service.url, wait_for_end=False, batching=batching)
    if of_lists:
        # The service has no lists, so they are made up.
        ends = [(Transaction(one, "shop", [ORDER]), COMMIT) for one in map(new_id, (1.0, 2.0, 3.0))]
        assert [one.end for one in await made.call("post_ends", ends)] == ["posted"] * 3
        await made.call("post_ends", ends[:1])
    else:
        for _ in range(4):
            assert (await made.block()).end == "posted"
    await until(service.ends)
    await made.call("close", 0.2)
    assert left_of(caplog) == [4]
    assert asyncio.all_tasks() == {asyncio.current_task()}


@KINDS
async def test_nothing_is_left_if_the_ends_are_answered_in_time(
    kind: type[Any], service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    made = Either(kind, service.url, wait_for_end=False)
    for _ in range(4):
        await made.block()
    service.answers.set()
    await made.call("close", SOON_S)
    assert left_of(caplog) == []


class Waits:
    """A listener that has no answer before the test is over."""

    def __init__(self) -> None:
        self.over, self.asked = threading.Event(), threading.Event()

    def check_local(self, transaction: Any) -> Verdict:
        self.asked.set()
        assert self.over.wait(SOON_S)
        return ROLLBACK


class Silent(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A service that hands out checks and takes halves, and is not reached with ends."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == CLAIM:
            return answer(200, CHECKS)
        if request.url.path == "/half":
            return answer(201, {"created": True})
        raise httpx.ReadTimeout("no answer")

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


@KINDS
async def test_the_grace_is_one_for_ends_and_for_answers_to_checks(kind: type[Any]) -> None:
    made, listener, grace_s = Either(kind, transport=Silent(), wait_for_end=False), Waits(), 3.0
    await made.block()
    for _ in range(3):
        made.producer.answer_checks(listener)
    await until(listener.asked.is_set)
    began = time.monotonic()
    await made.call("close", grace_s)
    took_s = time.monotonic() - began
    listener.over.set()
    # For a busy machine: each in turn would take 12 s.
    assert took_s < 3 * grace_s


@KINDS
async def test_a_closed_producer_begins_nothing(kind: type[Any]) -> None:
    halfnote = Scripted()
    made = Either(kind, transport=halfnote.transport())
    await made.block()
    await made.call("close")
    halfnote.came.clear()
    calls: list[tuple[Any, ...]] = [
        ("send_plain", ORDER),
        ("post_halves", [ORDER]),
        ("send_plain_many", [ORDER]),
        ("register", []),
        ("answer_due_checks", Waits()),
    ]
    for name, *given in calls:
        with pytest.raises(ProducerClosed):
            await made.call(name, *given)
    with pytest.raises(ProducerClosed):
        await made.block()
    with pytest.raises(ProducerClosed):
        made.producer.answer_checks(Waits())
    assert halfnote.came == []


async def test_a_closed_producer_is_of_use_on_another_loop() -> None:
    halfnote = Scripted()
    producer = TransactionProducer("http://localhost", group="shop", transport=halfnote.transport())
    await producer.close()

    async def again() -> None:
        async with producer, producer.transaction(ORDER):
            pass

    await asyncio.to_thread(asyncio.run, again())
    assert [path for path, _ in halfnote.came] == ["/half", "/end"]


async def test_a_close_on_one_loop_leaves_the_answering_of_another_loop() -> None:
    halfnote = Scripted({CLAIM: [answer(200, {"checks": []})]})
    producer = TransactionProducer("http://localhost", group="shop", transport=halfnote.transport())
    listener, answers, closed = Waits(), threading.Event(), threading.Event()

    async def beside() -> None:
        mine = producer.answer_checks(listener)
        await asyncio.to_thread(answers.set)
        await until(closed.is_set)
        claims = len(halfnote.asked(CLAIM))
        await until(lambda: len(halfnote.asked(CLAIM)) > claims)
        assert mine.running
        await producer.close()
        assert not mine.running

    other = asyncio.ensure_future(asyncio.to_thread(asyncio.run, beside()))
    own = producer.answer_checks(listener)
    await until(answers.is_set)
    await producer.close()
    assert not own.running
    closed.set()
    await other
    assert producer._answering == []


@KINDS
@pytest.mark.parametrize("wire", ["own", "httpx"])
@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("wait_for_end", [True, False])
@pytest.mark.parametrize("answers", [True, False])
async def test_a_block_that_begins_beside_the_close_posts_its_end(
    kind: type[Any],
    wire: str,
    batching: bool,
    wait_for_end: bool,
    answers: bool,
    service: Service,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its half is under way during the close. An end without an answer is left to check-back, as the log says."""
    transport = None
    if wire == "httpx":
        transport = httpx.HTTPTransport() if kind is SyncTransactionProducer else httpx.AsyncHTTPTransport()
    options = {"batching": batching, "wait_for_end": wait_for_end, "transport": transport}
    made = Either(kind, service.url, **options)
    if answers:
        service.answers.set()
    service.takes.clear()
    block = asyncio.create_task(made.block())
    await until(lambda: service.asked)
    await made.call("close", 0.0)
    service.takes.set()
    result = await block
    assert service.asked.count("/half") == 1
    assert service.ends() == 1
    assert result.end == ("recorded" if answers else "left_to_check")
    assert left_of(caplog) == ([] if answers else [1])


@KINDS
async def test_the_end_of_a_block_that_was_open_at_the_close_is_posted(kind: type[Any]) -> None:
    halfnote = Scripted()
    made = Either(kind, transport=halfnote.transport())
    inside = made.producer.close
    assert (await made.block(inside)).end == "recorded"
    assert [path for path, _ in halfnote.came] == ["/half", "/end"]
    with pytest.raises(ProducerClosed):
        await made.block()


@KINDS
async def test_a_producer_that_is_entered_again_is_open_again(kind: type[Any], before: set[threading.Thread]) -> None:
    """So an application whose lifespan starts twice works. The end of a block is posted in the background, too."""
    halfnote = Scripted()
    made = Either(kind, transport=halfnote.transport(), wait_for_end=False)
    for _ in range(3):
        await made.call("__enter__" if made.is_sync else "__aenter__")
        assert (await made.block()).end == "posted"
        await made.call("__exit__" if made.is_sync else "__aexit__", None, None, None)
        with pytest.raises(ProducerClosed, match="open it again"):
            await made.block()
    assert len(halfnote.asked("/half")) == len(halfnote.ends()) == 3
    assert of_producers(before) == []


class Closes:
    """A listener that closes its producer."""

    def __init__(self, made: Either) -> None:
        self.made, self.outcome = made, list[Any]()

    def check_local(self, transaction: Any) -> Any:
        if not self.made.is_sync:
            return self._closed()
        try:
            self.outcome.append(self.made.producer.close(SOON_S))
        except BaseException as error:
            self.outcome.append(error)
            raise
        return ROLLBACK

    async def _closed(self) -> Verdict:
        try:
            self.outcome.append(await self.made.producer.close(SOON_S))
        except BaseException as error:
            self.outcome.append(error)
            raise
        return ROLLBACK


@KINDS
async def test_a_listener_may_close_its_producer(kind: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    """The close waits for the ends, and not for the answer of the listener, which follows."""
    halfnote = Scripted({CLAIM: [answer(200, CHECKS), answer(200, {"checks": []})]})
    made = Either(kind, transport=halfnote.transport(), wait_for_end=False)
    for _ in range(3):
        await made.block()
    listener = Closes(made)
    answering = made.producer.answer_checks(listener)
    await until(lambda: not answering.running)
    assert listener.outcome == [None]
    assert len(halfnote.ends()) == 3
    assert [one["answers"][0]["verdict"] for one in halfnote.asked("/producer-groups/shop/checks/answers")] == [
        "rollback"
    ]
    with pytest.raises(ProducerClosed):
        await made.block()
    assert left_of(caplog) == []


@pytest.mark.parametrize("is_canceled", [False, True])
async def test_closes_beside_each_other_log_each_transaction_once(
    is_canceled: bool, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    producer = TransactionProducer(service.url, group="shop", attempt_s=SOON_S, wait_for_end=False)
    for _ in range(3):
        async with producer.transaction(ORDER):
            pass
    await until(service.ends)
    first = asyncio.create_task(producer.close(SOON_S if is_canceled else 0.2))
    others = [asyncio.create_task(producer.close(0.2)) for _ in range(2)]
    await asyncio.sleep(0)
    if is_canceled:
        first.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert sum(left_of(caplog)) == 3
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Slow(httpx.AsyncBaseTransport):
    """Takes halves, gives ends no answer, and closes its connections only after `may_close`."""

    def __init__(self) -> None:
        self.may_close, self.has_end, self.began, self.closed = asyncio.Event(), False, 0, 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/half":
            return httpx.Response(201, json={"created": True})
        self.has_end = True
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def aclose(self) -> None:
        self.began += 1
        await self.may_close.wait()
        self.closed += 1


@pytest.mark.parametrize("batching", [True, False])
async def test_connections_are_closed_although_what_closes_them_is_canceled_again(batching: bool) -> None:
    transport = Slow()
    producer = TransactionProducer(
        "http://localhost", group="shop", attempt_s=SOON_S, wait_for_end=False, transport=transport, batching=batching
    )
    async with producer.transaction(ORDER):
        pass
    await until(lambda: transport.has_end)
    # The first is canceled, so the end closes the connections. The second cancels the end, and the third again.
    first, *others = (asyncio.create_task(producer.close(grace_s)) for grace_s in (SOON_S, 0.1, 0.2))
    await asyncio.sleep(0)
    first.cancel()
    await until(lambda: transport.began)
    await asyncio.sleep(0.3)
    assert not any(other.done() for other in others)
    transport.may_close.set()
    await asyncio.gather(first, *others, return_exceptions=True)
    assert transport.closed == transport.began > 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_close_leaves_what_begins_after_it_is_opened_again(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    producer = TransactionProducer(service.url, group="shop", attempt_s=SOON_S, wait_for_end=False)
    async with producer.transaction(ORDER):
        pass
    await until(service.ends)
    closing = asyncio.create_task(producer.close(0.5))
    await asyncio.sleep(0.05)
    async with producer:
        async with producer.transaction(ORDER) as second:
            pass
        await closing
        assert left_of(caplog) == [1]
        service.answers.set()
    # The next close waits for it.
    assert str(second.transaction_id) in service.recorded
    assert left_of(caplog) == [1]


async def test_connections_of_a_closed_producer_that_end_late_leave_those_that_it_opened_again() -> None:
    transport = Slow()
    transport.may_close.set()
    producer = TransactionProducer(
        "http://localhost", group="shop", attempt_s=SOON_S, wait_for_end=False, transport=transport, batching=False
    )
    async with producer.transaction(ORDER):
        pass
    await until(lambda: transport.has_end)
    # A close that is canceled leaves its connections to the end that is under way.
    first, others = (asyncio.create_task(producer.close(grace_s)) for grace_s in (SOON_S, 0.2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    async with producer:
        async with producer.transaction(ORDER):
            pass
        await others
        # Another loop is now the last one that used it.
        await asyncio.to_thread(asyncio.run, producer.close())
        closed = transport.closed
        await producer.close(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert transport.closed > closed


@KINDS
async def test_closes_beside_each_other_wait_for_the_same_answer_to_a_check(kind: type[Any]) -> None:
    halfnote = Scripted({CLAIM: [answer(200, CHECKS), answer(200, {"checks": []})]})
    made, listener = Either(kind, transport=halfnote.transport()), Waits()
    answering = made.producer.answer_checks(listener)
    await until(listener.asked.is_set)
    closes = [asyncio.create_task(made.call("close", SOON_S)) for _ in range(2)]
    done, _ = await asyncio.wait(closes, timeout=0.3)
    assert not done
    listener.over.set()
    await asyncio.gather(*closes)
    assert not answering.running
    assert len(halfnote.asked("/producer-groups/shop/checks/answers")) == 1
