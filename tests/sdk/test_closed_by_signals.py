"""`close` in a signal's handler, at each line of the driver at which the signal may come, and in real processes."""

import asyncio
import concurrent.futures.thread
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import halfnote.check_answering
import halfnote.consuming
import halfnote.flag
import halfnote.sync_consumer
import halfnote.sync_driver
import halfnote.sync_producer
import httpx
import pytest
from halfnote import (
    Consumer,
    Outgoing,
    ProducerClosed,
    SyncConsumer,
    SyncTransactionProducer,
    TransactionProducer,
    time_limits,
)

from tests.sdk.coordinators import Answer, Scripted, answer
from tests.sdk.doc_blocks import ROOT
from tests.sdk.pulled import NACK, URL, claimed, outcomes, scripted
from tests.sdk.test_closed_producers import CLAIM, Service, service

__all__ = ["service"]

ORDER = Outgoing("order", {"order": 1030})
# For a busy machine. A close that hangs takes it all.
SOON_S = 50.0
LINES_MOST = 1000


class Done(BaseException):
    """What a signal's handler raises, as SystemExit."""


class Run:
    """Two blocks on a thread of their own, whose handler is called before a line of the driver."""

    def __init__(self, line: int, *, raises: bool, **options: Any) -> None:
        self._left, self._raises, self._in_handler = line, raises, False
        self.halfnote, self.clients, self.outcome = Scripted(), list[httpx.Client](), None
        self.was_called, self.is_over = False, threading.Event()
        self.producer = SyncTransactionProducer(
            "http://halfnote", group="shop", transport=self.halfnote.transport(), **options
        )
        made = self.producer._driver._made

        def noted() -> httpx.Client:
            self.clients.append(made())
            return self.clients[-1]

        self.producer._driver._made = noted  # type: ignore[method-assign]

    def run(self) -> None:
        """Run the blocks. Raises AssertionError if they hang."""
        # A thread, so that what hangs ends this test alone.
        threading.Thread(target=self._work, daemon=True).start()
        assert self.is_over.wait(SOON_S), "it hangs"
        assert self.outcome is None or isinstance(self.outcome, (Done, ProducerClosed)), self.outcome

    def _work(self) -> None:
        sys.settrace(self._traced)
        try:
            for _ in range(2):
                with self.producer.transaction(ORDER):
                    pass
        except BaseException as error:
            self.outcome = error
        finally:
            sys.settrace(None)
            self.producer.close(SOON_S)
            self.is_over.set()

    def _traced(self, frame: FrameType, event: str, _: Any) -> "Callable[..., Any] | None":
        if frame.f_code.co_filename != halfnote.sync_driver.__file__:
            return None
        if event == "line" and not self.was_called:
            self._left -= 1
            if self._left < 0:
                self.was_called = True
                self.producer.close(SOON_S)
                if self._raises:
                    raise Done
        return self._traced


@pytest.mark.parametrize("wait_for_end", [True, False])
@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_a_handler_may_close_at_each_line(
    wait_for_end: bool, batching: bool, raises: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = {*threading.enumerate()}
    for line in range(LINES_MOST):
        run = Run(line, raises=raises, batching=batching, wait_for_end=wait_for_end)
        run.run()
        if not run.was_called:
            break
        halves = [half["transaction_id"] for half in run.halfnote.asked("/half")]
        ends = [end["transaction_id"] for end in run.halfnote.ends()]
        if raises:
            # What is under way is left to check-back, but nothing is posted twice.
            assert len(ends) == len(set(ends)), line
            assert set(ends) <= set(halves), line
        else:
            assert sorted(ends) == sorted(halves), line
            assert all(client.is_closed for client in run.clients), line
            assert "left to check-back" not in caplog.text, line
            assert [
                one.name for one in threading.enumerate() if one not in before and one.name == "halfnote-ends"
            ] == []
    assert 40 < line < LINES_MOST


class Closing:
    """A close on a thread of its own, with a handler that closes once more before a line of it in these files."""

    def __init__(
        self,
        line: int,
        close: Callable[[], object],
        files: Collection[str],
        *,
        raises: bool,
        handler: Callable[[], object] | None = None,
    ) -> None:
        self._left, self._close, self._handler, self._raises = line, close, handler or close, raises
        # A Condition does not survive an exception at each of its lines.
        self._files = {*files} if raises else {*files, threading.__file__}
        self.was_called, self.is_over, self.outcome = False, threading.Event(), list[BaseException]()
        # Where the handler interrupts it.
        self.within: list[str] = []

    def run(self) -> None:
        """Close. Raises AssertionError if it hangs."""
        threading.Thread(target=self._work, daemon=True).start()
        assert self.is_over.wait(SOON_S), f"it hangs: {self.within}"
        assert all(isinstance(one, Done) for one in self.outcome), self.outcome

    def _work(self) -> None:
        sys.settrace(self._traced)
        try:
            self._close()
        except BaseException as error:
            self.outcome.append(error)
        finally:
            sys.settrace(None)
            self.is_over.set()

    def _traced(self, frame: FrameType, event: str, _: Any) -> "Callable[..., Any] | None":
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line" and not self.was_called:
            self._left -= 1
            if self._left < 0:
                self.was_called = True
                self.within = [one.name for one in traceback.extract_stack(frame)]
                self._handler()
                if self._raises:
                    raise Done
        return self._traced


CLOSED_BY = {one.__file__ for one in (halfnote.sync_driver, halfnote.sync_producer, halfnote.check_answering)}


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_a_handler_may_close_at_each_line_of_a_close(
    raises: bool, answers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for line in range(LINES_MOST):
        caplog.clear()
        lost: list[Answer] = [httpx.ReadTimeout("no")]
        halfnote = Scripted({CLAIM: [no_checks], **({} if answers else {"/end": lost, "/ends": lost})})
        producer = SyncTransactionProducer(
            "http://halfnote", group="shop", transport=halfnote.transport(), wait_for_end=False
        )
        if not answers and not raises:
            # A handler above the lock waits for its whole grace for this thread. An exception at the last line of
            # `with` does not release the lock, so the thread would not end.
            producer.answer_checks(Unasked())
        for _ in range(2):
            with producer.transaction(ORDER):
                pass
        grace_s = SOON_S if answers else 0.0
        closing = Closing(line, partial(producer.close, grace_s), CLOSED_BY, raises=raises)
        closing.run()
        left = left_in(caplog.messages)
        if answers:
            assert (len({end["transaction_id"] for end in halfnote.ends()}), left) == (2, 0), (line, closing.within)
        else:
            # A handler that interrupts the line in the log repeats it.
            assert left == 2 or (left == 4 and "_log_left" in closing.within), (line, left, closing.within)
        if not closing.was_called:
            break
    assert 40 < line < LINES_MOST


CONSUMED_BY = {one.__file__ for one in (halfnote.sync_consumer, halfnote.consuming, halfnote.flag)}


@pytest.mark.parametrize("raises", [False, True])
def test_a_handler_may_close_a_consumer_at_each_line_of_a_close(raises: bool) -> None:
    # An exception at the last line of the executor's `with` does not release its lock.
    files = CONSUMED_BY if raises else {*CONSUMED_BY, concurrent.futures.thread.__file__}
    for line in range(LINES_MOST):
        coordinator = scripted(claimed(1, 2))
        consumer = SyncConsumer(URL, "worker", transport=coordinator.transport(), wait_s=0)
        assert len(consumer._claim()) == 2
        closing = Closing(line, consumer.close, files, raises=raises)
        closing.run()
        given_back = [handle for nack in coordinator.asked(NACK) for handle in nack["handles"]]
        # What an exception interrupts while it is given back comes again when its time is over.
        if not (raises and "_nack_held" in closing.within and not given_back):
            assert sorted(given_back) == ["h1", "h2"], (line, closing.within)
        assert consumer._keeper is not None
        consumer._keeper.join(SOON_S)
        assert not consumer._keeper.is_alive(), closing.within
        if not closing.was_called:
            break
    assert 40 < line < LINES_MOST


def test_a_handler_may_stop_a_consumer_at_each_line_of_a_pause() -> None:
    """A claim that failed is repeated after a pause."""
    for line in range(LINES_MOST):
        consumer = SyncConsumer(URL, "worker", transport=scripted().transport())
        pausing = Closing(line, partial(consumer._pause, 0.3, None), CONSUMED_BY, raises=False, handler=consumer.stop)
        pausing.run()
        assert consumer._stopping.is_set() is pausing.was_called
        consumer.close()
        if not pausing.was_called:
            break
    assert 8 < line < LINES_MOST


def no_checks(_: httpx.Request) -> httpx.Response:
    time.sleep(0.01)
    return answer(200, {"checks": []})


class Unasked:
    """A listener that gets no check."""

    def check_local(self, transaction: Any) -> Any:
        raise AssertionError(transaction)


# A process with three ends in the background, the first of them under way. Arguments: URL, form, grace.
PROGRAM = """
import logging, signal, sys, time
from halfnote import Outgoing, SyncTransactionProducer

url, form, grace_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
logging.basicConfig(level=logging.WARNING, format="%(message)s")
producer = SyncTransactionProducer(url, group="shop", attempt_s=60, wait_for_end=False)


def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()


def end(*_):
    say("signal")
    if "only exits" not in form:
        producer.close(grace_s)
        say("closed")
    sys.exit(7)


def work():
    for _ in range(3):
        with producer.transaction(Outgoing("order", {"order": 1030})):
            pass
    say("ready")
    if "waits" in form:
        while True:
            time.sleep(0.01)


signal.signal(signal.SIGTERM, end)
if "with" in form:
    with producer:
        work()
else:
    work()
    producer.close(grace_s)
"""


class Process:
    """A process of PROGRAM."""

    def __init__(self, *given: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "sdk")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *given],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._timer = threading.Timer(SOON_S, self._process.kill)
        self._timer.start()

    def until(self, text: str) -> None:
        """Wait for a line."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == text, self._process.stderr

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def log(self) -> list[str]:
        """Wait for the end of the process; return the lines of its log."""
        _, log = self._process.communicate()
        assert self._process.returncode == 7, (self._process.returncode, log)
        return log.splitlines()

    def stop(self) -> None:
        """Kill the process if it still runs."""
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()


@contextmanager
def process(*given: str) -> Iterator[Process]:
    started = Process(*given)
    try:
        yield started
    finally:
        started.stop()


def closing(service: Service, running: Process, form: str) -> None:
    """Bring a process into its first close."""
    running.until("ready")
    began = time.monotonic()
    while not service.ends():
        assert time.monotonic() - began < SOON_S
        time.sleep(0.01)
    if "waits" in form:
        running.terminate()
        running.until("signal")
    # So that it is mostly in the close. The outcome is the same otherwise.
    time.sleep(0.2)


def left_in(log: Sequence[str]) -> int:
    """Return how many transactions the lines of a log say are left to check-back."""
    return sum(int(line.split()[0]) for line in log if "left to check-back" in line)


FORMS = pytest.mark.parametrize("form", ["waits", "waits, with", "with", "close"])


@FORMS
def test_a_signal_during_a_close_waits_for_the_ends(service: Service, form: str) -> None:
    with process(service.url, form, str(SOON_S)) as running:
        closing(service, running, form)
        running.terminate()
        running.until("signal")
        time.sleep(0.2)
        service.answers.set()
        log = running.log()
    assert len(set(service.recorded)) == len(service.recorded) == 3
    assert left_in(log) == 0


@FORMS
@pytest.mark.parametrize("grace_s", ["0", "0.5"])
def test_a_signal_during_a_close_leaves_no_end_without_a_line(service: Service, form: str, grace_s: str) -> None:
    """A request that is under way is waited for, so it is answered when both closes wait."""
    with process(service.url, form, grace_s) as running:
        closing(service, running, form)
        running.terminate()
        running.until("signal")
        time.sleep(1)
        service.answers.set()
        log = running.log()
    assert len(set(service.recorded)) == len(service.recorded) >= 1
    assert left_in(log) == 3 - len(service.recorded)


@pytest.mark.parametrize("form", ["with, only exits", "close, only exits"])
def test_a_close_that_a_signal_ends_says_what_is_left(service: Service, form: str) -> None:
    with process(service.url, form, str(SOON_S)) as running:
        closing(service, running, form)
        running.terminate()
        running.until("signal")
        log = running.log()
    assert left_in(log) == 3


@contextmanager
def interrupted(condition: Callable[[], bool]) -> Iterator[None]:
    """Let a signal's handler raise on this thread, which is the main one, soon after the condition holds."""

    def interrupt() -> None:
        while not condition():
            time.sleep(0.01)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def raises(*_: object) -> None:
        raise Done

    before = signal.signal(signal.SIGUSR1, raises)
    sending = threading.Thread(target=interrupt)
    sending.start()
    try:
        yield
        sending.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_ends_all_that_a_close_waits_for(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread for ends of the first close, whose request is under way, and that of the ends since."""
    before = {*threading.enumerate()}
    producer = SyncTransactionProducer(service.url, group="shop", attempt_s=SOON_S, wait_for_end=False)
    for asked in (1, 2):
        producer.__enter__()
        with producer.transaction(ORDER):
            pass
        while service.ends() < asked:
            time.sleep(0.01)
        with producer.transaction(ORDER):
            pass
        with interrupted(producer._driver.is_closed), pytest.raises(Done):
            producer.close(SOON_S)
        assert producer._driver._client is None
    assert left_in(caplog.messages) == 4
    service.answers.set()
    began = time.monotonic()
    while threads := [one.name for one in {*threading.enumerate()} - before if one.name == "halfnote-ends"]:
        assert time.monotonic() - began < SOON_S, threads
        time.sleep(0.01)
    assert service.ends() == 2


def test_a_handler_that_raises_in_a_close_ends_the_thread_that_extends() -> None:
    asked, goes_on = threading.Event(), threading.Event()

    def gives_no_answer(request: httpx.Request) -> httpx.Response:
        asked.set()
        assert goes_on.wait(SOON_S)
        return outcomes(request)

    coordinator = scripted(claimed(1, 2))
    coordinator.answers[NACK] = [gives_no_answer]  # type: ignore[index]
    consumer = SyncConsumer(URL, "worker", transport=coordinator.transport())
    messages = consumer.messages()
    next(messages)
    with interrupted(asked.is_set), pytest.raises(Done):
        consumer.close()
    goes_on.set()
    keeper = consumer._keeper
    assert keeper is not None
    keeper.join(SOON_S)
    assert not keeper.is_alive()
    assert consumer._driver._client is None


async def test_a_close_that_is_canceled_leaves_no_task_and_no_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()
    inner = scripted(claimed(1, 2)).transport()

    class Silent(httpx.AsyncBaseTransport):
        """Gives no answer to the first request that gives back."""

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == NACK and not asked.is_set():
                asked.set()
                await asyncio.Event().wait()
            return await inner.handle_async_request(request)

        async def aclose(self) -> None:
            closed.set()

    before = asyncio.all_tasks()
    consumer: Any = Consumer(URL, "worker", transport=Silent())
    messages = consumer.messages()
    await messages.__anext__()
    closing = asyncio.ensure_future(consumer.close())
    await asyncio.wait_for(asked.wait(), SOON_S)
    closing.cancel()
    await asyncio.wait([closing])
    assert asyncio.all_tasks() == before
    assert closed.is_set()
    await messages.aclose()


async def test_a_close_of_an_asynchronous_producer_that_is_canceled_leaves_no_connection() -> None:
    asked, closed = asyncio.Event(), asyncio.Event()
    inner = Scripted().transport()

    class Silent(httpx.AsyncBaseTransport):
        """Gives no answer to an end."""

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/end":
                asked.set()
                await asyncio.Event().wait()
            if request.url.path == CLAIM:
                await asyncio.Event().wait()
            return await inner.handle_async_request(request)

        async def aclose(self) -> None:
            closed.set()

    before = asyncio.all_tasks()
    producer = TransactionProducer("http://halfnote", group="shop", transport=Silent(), wait_for_end=False)
    producer.answer_checks(Unasked())
    async with producer.transaction(ORDER):
        pass
    await asyncio.wait_for(asked.wait(), SOON_S)
    closing = asyncio.ensure_future(producer.close(SOON_S))
    await asyncio.sleep(0.1)
    closing.cancel()
    await asyncio.wait([closing])
    # The last request that is under way closes the connections.
    await asyncio.wait_for(asyncio.gather(*(asyncio.all_tasks() - before), return_exceptions=True), SOON_S)
    assert closed.is_set()


@pytest.mark.parametrize("runs", [True, False])
async def test_a_stop_in_a_signal_s_handler_ends_a_claim_that_waits(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else wakes the event loop."""
    monkeypatch.setattr(time_limits, "LOOKED_WITHIN_S", 0.0)
    asked = threading.Event()

    class Waits(httpx.AsyncBaseTransport):
        """Has no message."""

        async def handle_async_request(self, _: httpx.Request) -> httpx.Response:
            asked.set()
            return await asyncio.get_running_loop().create_future()

    consumer = Consumer(URL, "worker", wait_s=10 * SOON_S, transport=Waits())

    async def handler(_: Any) -> None:
        pytest.fail("there is no message")

    async def loops() -> None:
        async for _ in consumer.messages():
            pytest.fail("there is no message")

    def interrupt() -> None:
        assert asked.wait(SOON_S)
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: consumer.stop())
    sending = threading.Thread(target=interrupt)
    sending.start()
    try:
        await asyncio.wait_for(consumer.run(handler) if runs else loops(), SOON_S)
    finally:
        sending.join()
        signal.signal(signal.SIGUSR1, before)
    await consumer.close()
