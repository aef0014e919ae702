"""Runs exchanges with httpx on threads: the caller's own, and one in the background for ends that are repeated."""

import heapq
import inspect
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from halfnote.batching import TRANSACTIONS_MOST
from halfnote.exchange import (
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
LEFT_AT_CLOSE = "%d ends in the background, or lists of ends, are left to check-back: the producer was closed"


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
        self._lock = threading.Lock()
        self._process: int | None = None
        self._client: httpx.Client | None = None
        self._background: Background | None = None

    def run(self, exchange: Exchange[T]) -> T:
        """Run an exchange to its end; return its result or raise its error."""
        try:
            effect = next(exchange)
            while True:
                effect = exchange.send(self.do(effect))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def later(self, exchange: Exchange[Any]) -> bool:
        """Run an exchange in the background; False if too many are under way."""
        self._current()
        with self._lock:
            if self._background is None:
                self._background = Background(self)
            return self._background.add(exchange)

    def close(self, grace_s: float) -> None:
        """Give background exchanges `grace_s` seconds, then end them and close the connections."""
        if self._process != os.getpid():
            return
        with self._lock:
            background, self._background = self._background, None
        # End it before the connections that it uses.
        if background is not None:
            background.close(grace_s)
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def do(self, effect: Effect) -> Any:
        """Perform one step and return its outcome."""
        if isinstance(effect, Request):
            return self._asked(effect)
        if isinstance(effect, Wait):
            return time.sleep(effect.seconds)
        if isinstance(effect, Later):
            return self.later(effect.exchange)
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
        try:
            answer = self._current().request(
                request.method,
                self._url + request.path,
                content=request.content or None,
                headers=request.headers,
                timeout=request.timeout_s,
            )
        except FAILURES as error:
            return unanswered(error, request.timeout_s)
        return answered(answer)

    def _current(self) -> httpx.Client:
        if self._process == os.getpid() and self._client is not None:
            return self._client
        if self._process not in (None, os.getpid()):
            # Another thread may have held the lock at the fork, and that thread does not exist in the child.
            self._lock = threading.Lock()
        with self._lock:
            if self._process != os.getpid() or self._client is None:
                # After a fork the old sockets belong to the parent, so they stay open.
                self._client = httpx.Client(
                    headers=self._headers,
                    transport=self._transport,
                    limits=LIMITS,
                    trust_env=False,
                    verify=trusted(self._url),
                )
                self._background = self._background if self._process == os.getpid() else None
                self._process = os.getpid()
            return self._client


class Background:
    """One thread that runs exchanges when they are due; while one waits, others continue.

    The requests of those that are due at the same time are sent together.
    """

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver
        self._due: list[tuple[float, int, Exchange[Any], Any]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        # `until`: when the grace is over. After that nothing more is sent.
        self._closing, self._until, self._dropping = False, math.inf, False
        # When the request that is under way is over at the latest.
        self._over_by = 0.0
        self._thread = threading.Thread(target=self._work, name="halfnote-ends", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange[Any]) -> bool:
        """Accept an exchange that has not begun; False if there are too many or the thread is closing."""
        with self._changed:
            if self._closing or len(self._due) >= BACKGROUND_MAX:
                return False
            self._put(time.monotonic(), exchange, None)
            return True

    def close(self, grace_s: float) -> None:
        """Wait for all exchanges, at most that long; drop the others, and say so in the log.

        A thread cannot end its request. So it waits for the one that is under way too, until the time limit of that.
        """
        with self._changed:
            self._closing, self._until = True, time.monotonic() + grace_s
            self._changed.notify_all()
        self._thread.join(grace_s)
        with self._changed:
            self._dropping = True
            left = len(self._due)
            self._due.clear()
            self._changed.notify_all()
            over_by = self._over_by
        if left:
            log.warning(LEFT_AT_CLOSE, left)
        self._thread.join(max(0.0, over_by - time.monotonic()) + LATE_S)

    def _put(self, at: float, exchange: Exchange[Any], brought: Any) -> None:
        heapq.heappush(self._due, (at, next(self._number), exchange, brought))
        self._changed.notify_all()

    def _next(self) -> list[tuple[Exchange[Any], Any]]:
        """Wait for exchanges that are due; return some of them, or none at the end."""
        with self._changed:
            while True:
                if not self._due:
                    if self._closing:
                        return []
                    self._changed.wait()
                    continue
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s <= 0:
                    return self._taken()
                self._changed.wait(wait_s)

    def _taken(self) -> list[tuple[Exchange[Any], Any]]:
        found: list[tuple[Exchange[Any], Any]] = []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and len(found) < TRANSACTIONS_MOST:
            _, _, exchange, brought = heapq.heappop(self._due)
            found.append((exchange, brought))
        return found

    def _work(self) -> None:
        while due := self._next():
            left = 0
            asking: list[tuple[Exchange[Any], Request]] = []
            for exchange, brought in due:
                effect = self._advanced(exchange, brought)
                if isinstance(effect, Request):
                    asking.append((exchange, effect))
                elif isinstance(effect, Wait):
                    with self._changed:
                        if self._dropping:
                            left += 1
                        else:
                            self._put(time.monotonic() + effect.seconds, exchange, None)
            if asking and self._dropping:
                left += len(asking)
            elif asking:
                self._ask(asking)
            if left:
                log.warning(LEFT_AT_CLOSE, left)

    def _advanced(self, exchange: Exchange[Any], brought: Any) -> Effect | None:
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

    def _ask(self, asking: Sequence[tuple[Exchange[Any], Request]]) -> None:
        """Send requests; their exchanges go on with the answers."""
        try:
            answers = self._driver.ask_all([request for _, request in asking], self._ask_in_time)
        except Exception as error:
            log.error("%d ends in the background failed", len(asking), exc_info=error)
            return
        with self._changed:
            for (exchange, _), answer in zip(asking, answers, strict=True):
                self._put(time.monotonic(), exchange, answer)

    def _ask_in_time(self, request: Request) -> Response | NoAnswer:
        """Send a request, for which there is time until the grace of the close is over."""
        with self._changed:
            if self._dropping:
                return NoAnswer("the producer was closed", sent=False)
            now = time.monotonic()
            timeout_s = min(request.timeout_s, max(self._until - now, SHORTEST_TIMEOUT_S))
            self._over_by = now + timeout_s
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
