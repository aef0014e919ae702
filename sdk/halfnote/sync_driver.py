"""Runs exchanges with httpx on threads: the caller's own, and one in the background for ends that are repeated.

A signal's handler may close the producer while its own thread is at any line here. So the lock can be taken again, what
holds it looks again after each change that others build on, and who waits for a thread frees it.
"""

import heapq
import inspect
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx

from halfnote.batching import TRANSACTIONS_MOST
from halfnote.errors import ProducerClosed
from halfnote.exchange import (
    LEFT_AS_CLOSED,
    LEFT_AT_CLOSE,
    LEFT_TOO_MANY,
    SHORTEST_TIMEOUT_S,
    Call,
    Effect,
    Exchange,
    Later,
    NoAnswer,
    Raised,
    Request,
    Response,
    Returned,
    Wait,
)
from halfnote.http import FAILURES, LIMITS, answered, base_of, unanswered
from halfnote.sync_batching import Ask, Batching
from halfnote.tls import trusted

T = TypeVar("T")
log = logging.getLogger("halfnote")

BACKGROUND_MAX = 10_000
# What a request under way may take beyond its time limit as its producer closes.
LATE_S = 1.0
# How often a close looks whether the thread is over: a signal's handler may take the notice that this wait is for.
LOOK_S = 0.5


class SyncDriver:
    """One client and one background thread for each process: neither survives a fork. Safe to share among threads."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        transport: httpx.BaseTransport | None = None,
        *,
        batching: bool = False,
    ) -> None:
        self._url, self._headers, self._transport = base_of(url), dict(headers), transport
        self._is_batching = batching
        self._batching: tuple[int, Batching] | None = None
        self._lock = threading.RLock()
        self._process: int | None = None
        self._client: httpx.Client | None = None
        # The client of each request; the last one closes a client that is no longer the driver's.
        self._asking: dict[object, httpx.Client] = {}
        self._background: Background | None = None
        # Those that were closed and whose thread may still run: each close waits for them.
        self._closing: list[Background] = []
        # The process for which `end_background` was called. A request that follows has a client of its own.
        self._closed_in: int | None = None

    def require_open(self) -> None:
        """Raise ProducerClosed after `end_background` or `close`."""
        if self.is_closed():
            raise ProducerClosed

    def run(self, exchange: Exchange[T]) -> T:
        """Run an exchange to its end; return its result or raise its error."""
        try:
            effect = next(exchange)
            while True:
                effect = exchange.send(self.do(effect))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def later(self, exchange: Exchange[Any], transactions: int = 1, *, has_fallback: bool = False) -> bool:
        """Run an exchange in the background; False, with a line in the log, if too many are under way or it is closed.

        While a close still waits for ends, it waits for this one too, unless that has a fallback. `transactions` and
        `has_fallback`: as of `Later`.
        """
        self._enter_process()
        while (background := self._opened()) is not None:
            if background.add(exchange, transactions):
                return True
            if background is self._background:
                break
        if has_fallback:
            return False
        if self.is_closed():
            with self._lock:
                closing = list(self._closing)
            if any(one.add(exchange, transactions, repeats=True) for one in closing):
                return True
            log.warning(LEFT_AS_CLOSED, transactions)
            return False
        log.warning(LEFT_TOO_MANY, transactions)
        return False

    def follow(self, exchange: Exchange[Any]) -> None:
        """Run the end of a bound session in the background; after a close now, on this thread."""
        if self.later(exchange, has_fallback=True):
            return
        if not self.is_closed():
            log.warning(LEFT_TOO_MANY, 1)
            return
        try:
            self.run(exchange)
        except Exception as error:
            # The session's code has no part in it.
            log.error("an end after the close failed", exc_info=error)

    def close(self, grace_s: float) -> None:
        """End what is in the background within `grace_s` seconds, and close the connections."""
        self.end_background(grace_s)
        self.disconnect()

    def end_background(self, grace_s: float) -> None:
        """Give background exchanges `grace_s` seconds, then end them, and say so in the log. From now on none begins.

        A request that is under way is waited for too, until its own time limit. A close beside another one, also of a
        signal's handler above it, waits for the same exchanges; the grace that is over first is that of both.
        """
        self._enter_process()
        until = time.monotonic() + grace_s
        with self._lock:
            self._closed_in = os.getpid()
            while (background := self._background) is not None:
                # First, so that a close of a signal's handler finds it in one of the two.
                self._closing.append(background)
                if self._background is background:
                    self._background = None
            closing = list(dict.fromkeys(self._closing))
        try:
            for one in closing:
                one.begin_close(until)
            for one in closing:
                one.finish_close()
        except BaseException:
            # An exception of a signal's handler ends the grace of all. Without another wait: a request that is under
            # way may last.
            for one in closing:
                one.leave()
            raise
        with self._lock:
            self._closing = [one for one in self._closing if not one.is_over]

    def open(self) -> None:
        """Begin exchanges again after a close."""
        self._closed_in = None

    def disconnect(self) -> None:
        """Close the connections; the last request that is under way on them closes them otherwise."""
        self._enter_process()
        with self._lock:
            client, self._client = self._client, None
            is_used = client in self._asking.values()
        if client is not None and not is_used:
            client.close()

    def do(self, effect: Effect) -> Any:
        """Perform one step and return its outcome."""
        if isinstance(effect, Request):
            return self._asked(effect)
        if isinstance(effect, Wait):
            return time.sleep(effect.seconds)
        if isinstance(effect, Later):
            return self.later(effect.exchange, effect.transactions, has_fallback=effect.has_fallback)
        return _called(effect)

    def ask_all(self, requests: Sequence[Request], ask: Ask) -> list[Response | NoAnswer]:
        """Send requests by `ask`, together where they may be; return their answers in the same order."""
        if not self._is_batching:
            return [ask(request) for request in requests]
        return self._batched().ask_all(requests, ask)

    def _asked(self, request: Request) -> Response | NoAnswer:
        return self._batched().ask(request) if self._is_batching else self.ask(request)

    def _batched(self) -> Batching:
        if self._batching is None or self._batching[0] != os.getpid():
            # Threads that send for others do not exist in a child. Two threads may make one each at first.
            self._batching = os.getpid(), Batching(self.ask)
        return self._batching[1]

    def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request by itself; return its answer."""
        place = object()
        try:
            return self._asked_by(self._taken(place), request)
        finally:
            self._leave(place)

    def _asked_by(self, client: httpx.Client, request: Request) -> Response | NoAnswer:
        try:
            answer = client.request(
                request.method,
                self._url + request.path,
                content=request.content or None,
                headers=request.headers,
                timeout=request.timeout_s,
            )
        except FAILURES as error:
            return unanswered(error, request.timeout_s)
        return answered(answer)

    def _taken(self, place: object) -> httpx.Client:
        """Return the client for a request, which must then leave it."""
        self._enter_process()
        with self._lock:
            while True:
                found = self._client
                client = self._asking[place] = self._made() if found is None else found
                if found is None and self._client is None:
                    self._client = client
                if client is self._client:
                    return client
                # A signal's handler has closed it, or made another one.
                self._leave(place)

    def _leave(self, place: object) -> None:
        with self._lock:
            client = self._asking.pop(place, None)
            if client is None or client in self._asking.values():
                return
            if client is self._client:
                if not self.is_closed():
                    return
                self._client = None
        client.close()

    def _opened(self) -> "Background | None":
        """Return what runs in the background; None after a close."""
        with self._lock:
            while not self.is_closed():
                if (found := self._background) is not None:
                    return found
                made = Background(self, self._lock)
                if self._background is None:
                    self._background = made
                if self.is_closed() or self._background is not made:
                    # A signal's handler has closed the producer, or made another one.
                    if self._background is made:
                        self._background = None
                    made.close(0)
        return None

    def _made(self) -> httpx.Client:
        return httpx.Client(
            headers=self._headers,
            transport=self._transport,
            limits=LIMITS,
            trust_env=False,
            verify=trusted(self._url),
        )

    def is_closed(self) -> bool:
        """Return whether `end_background` or `close` was called, and not `open` since."""
        return self._closed_in == os.getpid()

    def _enter_process(self) -> None:
        """Forget what belongs to the parent after a fork: its sockets stay open, and its threads do not exist here."""
        if self._process == os.getpid():
            return
        if self._process is not None:
            # Another thread may have held the lock at the fork.
            self._lock = threading.RLock()
        with self._lock:
            if self._process != os.getpid():
                self._client, self._background, self._closing, self._asking = None, None, [], {}
                self._process = os.getpid()


@dataclass(eq=False)
class _Running:
    """An exchange in the background, and of how many transactions it is.

    The first that takes it owns it: the thread in the background, the code that added it, or a close.
    """

    exchange: Exchange[Any]
    transactions: int
    is_over: bool = False
    # `setdefault` needs no lock.
    _owner: dict[str, object] = field(default_factory=dict)

    def owner(self, otherwise: object) -> object:
        """Return the first that took it; `otherwise` takes it if it is free."""
        return self._owner.setdefault("owner", otherwise)

    def is_left_by(self, thread: int) -> bool:
        """Return whether a thread that closes is the first that leaves it."""
        return self._owner.setdefault("left by", thread) == thread


class Background:
    """One thread that runs exchanges when they are due; while one waits, others continue.

    The requests of those that are due at the same time are sent together. What is new comes to the thread without a
    lock, because a signal's handler may close this on the thread that adds. `lock`: the driver's.
    """

    def __init__(self, driver: SyncDriver, lock: "threading.RLock") -> None:
        self._driver = driver
        # None only wakes the thread.
        self._new: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        # Those that are neither over nor logged as left; one that is over may be added late, for a moment.
        self._open: set[_Running] = set()
        # The thread's own, as is all that is below.
        self._due: list[tuple[float, int, _Running, Any]] = []
        self._number = itertools.count()
        # It ends unless it finds another one.
        self._ending = False
        # When the request that is under way is over at the latest.
        self._over_by = 0.0
        # `until`: when the grace is over. After that nothing more is sent. The closing threads set them.
        self._closing, self._until, self._dropping = False, math.inf, False
        self.is_over, self._changed = False, threading.Condition(lock)
        self._thread = threading.Thread(target=self._run, name="halfnote-ends", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange[Any], transactions: int, *, repeats: bool = False) -> bool:
        """Accept an exchange that has not begun; False if there are too many or the thread is closing.

        One that `repeats` an end is accepted until the thread ends, or drops what is left.
        """
        if self._refuses(repeats) or len(self._due) + self._new.qsize() >= BACKGROUND_MAX:
            return False
        running = _Running(exchange, transactions)
        self._new.put(running)
        # After that: a close of a signal's handler between leaves it to the code below.
        self._open.add(running)
        if running.is_over:
            self._open.discard(running)
        # The thread may not see it any more. What it takes runs, or is left with a line in the log.
        if self._refuses(repeats) and running.owner(running) is running:
            self._open.discard(running)
            return False
        return True

    def _refuses(self, repeats: bool) -> bool:
        return (self._ending or self._dropping or self.is_over) if repeats else self._closing

    def close(self, grace_s: float) -> None:
        """Wait for all exchanges, at most that long; drop the others, and say so in the log.

        A thread cannot end its request. So it waits for the one that is under way too, until the time limit of that.
        An exchange that closes its own thread waits for nothing. Several threads may call it, and a signal's handler
        above another call: each waits, until the first grace is over.
        """
        self.begin_close(time.monotonic() + grace_s)
        self.finish_close()

    def begin_close(self, until: float) -> None:
        """Accept no new exchange; the grace of the others is over at that time of the monotonic clock."""
        if not self._is_own():
            with self._changed:
                self._until = min(self._until, until)
        self._closing = True
        self._new.put(None)

    def finish_close(self) -> None:
        """Wait as `close` does, after `begin_close`."""
        if self._is_own():
            return
        try:
            self._wait(self._until)
            self._drop()
            self._wait(max(self._until, self._over_by) + LATE_S, drops=True)
        finally:
            # An exception of a signal's handler ends the grace.
            self.leave()

    def leave(self) -> None:
        """Drop what is left, and say so in the log, without a wait. An exchange does not do it to its own thread."""
        if not self._is_own():
            self._closing = True
            self._drop()
            self._log_left()

    def _is_own(self) -> bool:
        return threading.current_thread() is self._thread

    def _drop(self) -> None:
        """Send nothing more."""
        self._dropping = True
        self._new.put(None)
        with self._changed:
            self._changed.notify_all()

    def _log_left(self) -> None:
        """Log how many transactions are left: each once, or again if a signal's handler interrupts its log."""
        me, closes = threading.get_ident(), object()
        # What the code that added it takes back is not left here.
        added = [one for one in tuple(self._open) if not one.is_over and one.owner(closes) is not one]
        left = [one for one in added if one.is_left_by(me)]
        if left:
            log.warning(LEFT_AT_CLOSE, sum(one.transactions for one in left))
            self._open.difference_update(left)

    def _wait(self, until: float, *, drops: bool = False) -> None:
        """Wait for the thread, or for another close that drops what is left, unless this one `drops` it.

        This frees the lock, also one that the code below a signal's handler holds.
        """
        with self._changed:
            while not (self.is_over or (self._dropping and not drops)):
                if (left_s := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left_s, LOOK_S))
            is_over = self.is_over
        if is_over:
            # With a limit, because the code below a signal's handler may be in a join of it.
            self._thread.join(LATE_S)

    def _collect(self, wait_s: float | None = 0.0) -> None:
        """Take what is new; wait for it so long, or without a limit."""
        while True:
            try:
                running = self._new.get(timeout=wait_s) if wait_s != 0 else self._new.get_nowait()
            except queue.Empty:
                return
            wait_s = 0.0
            if running is not None and running.owner(self) is self:
                self._open.add(running)
                self._put(time.monotonic(), running, None)

    def _put(self, at: float, running: _Running, brought: Any) -> None:
        """Continue an exchange at a time."""
        heapq.heappush(self._due, (at, next(self._number), running, brought))

    def _end(self, running: _Running) -> None:
        running.is_over = True
        self._open.discard(running)

    def _next(self) -> list[tuple[_Running, Any]]:
        """Wait for exchanges that are due; return some of them, or none at the end."""
        self._collect()
        while not self._dropping:
            if not self._due:
                if self._closing:
                    # One that was added before the close may have come since, or one that repeats an end.
                    self._ending = True
                    self._collect()
                    if not self._due:
                        return []
                    self._ending = False
                    continue
                self._collect(None)
                continue
            wait_s = self._due[0][0] - time.monotonic()
            if wait_s <= 0:
                return self._taken()
            self._collect(wait_s)
        return self._answered()

    def _taken(self) -> list[tuple[_Running, Any]]:
        found: list[tuple[_Running, Any]] = []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and len(found) < TRANSACTIONS_MOST:
            _, _, running, brought = heapq.heappop(self._due)
            found.append((running, brought))
        return found

    def _answered(self) -> list[tuple[_Running, Any]]:
        """Take those that an answer may have ended; the others are left."""
        found = [(running, brought) for _, _, running, brought in self._due if brought is not None]
        self._due = [one for one in self._due if one[3] is None]
        return found

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _work(self) -> None:
        while due := self._next():
            asking: list[tuple[_Running, Request]] = []
            for running, brought in due:
                effect = self._advanced(running.exchange, brought)
                if isinstance(effect, Request):
                    asking.append((running, effect))
                elif effect is None:
                    self._end(running)
                elif not self._dropping:
                    self._put(time.monotonic() + effect.seconds, running, None)
            if asking and not self._dropping:
                self._ask(asking)

    def _advanced(self, exchange: Exchange[Any], brought: Any) -> Request | Wait | None:
        """Run an exchange up to its next request or wait; None if it is over."""
        try:
            effect = exchange.send(brought)
            while not isinstance(effect, (Request, Wait)):
                effect = exchange.send(self._driver.do(effect))
        except StopIteration:
            return None
        except Exception as error:
            log.error("an end in the background failed", exc_info=error)
            return None
        return effect

    def _ask(self, asking: Sequence[tuple[_Running, Request]]) -> None:
        """Send requests; their exchanges go on with the answers."""
        try:
            answers = self._driver.ask_all([request for _, request in asking], self._ask_in_time)
        except Exception as error:
            log.error("%d ends in the background failed", len(asking), exc_info=error)
            for running, _ in asking:
                self._end(running)
            return
        for (running, _), answer in zip(asking, answers, strict=True):
            self._put(time.monotonic(), running, answer)

    def _ask_in_time(self, request: Request) -> Response | NoAnswer:
        """Send a request, for which there is time until the grace of the close is over."""
        now = time.monotonic()
        timeout_s = min(request.timeout_s, max(self._until - now, SHORTEST_TIMEOUT_S))
        # Before the look: a close that comes between waits for the request.
        self._over_by = now + timeout_s
        if self._dropping:
            return NoAnswer("the producer was closed", sent=False)
        return self._driver.ask(replace(request, timeout_s=timeout_s))


def _called(call: Call) -> Returned | Raised:
    try:
        value = call.function()
        if inspect.iscoroutine(value):
            value.close()
            raise TypeError("SyncTransactionProducer got an async function; use TransactionProducer, which awaits it")
        return Returned(value)
    except Exception as error:
        return Raised(error)
