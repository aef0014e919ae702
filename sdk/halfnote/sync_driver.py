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
from dataclasses import dataclass, replace
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
        # How many requests use each client; the last one closes a client that is no longer the driver's.
        self._asking: dict[httpx.Client, int] = {}
        self._background: Background | None = None
        # The process for which `end_background` was called. A request that follows has a client of its own.
        self._closed_in: int | None = None

    def require_open(self) -> None:
        """Raise ProducerClosed after `end_background` or `close`."""
        if self._is_closed():
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

        `transactions` and `has_fallback`: as of `Later`.
        """
        self._enter_process()
        with self._lock:
            is_closed = self._is_closed()
            if not is_closed and self._background is None:
                self._background = Background(self)
            if not is_closed and self._background is not None and self._background.add(exchange, transactions):
                return True
        if not has_fallback:
            log.warning(LEFT_AS_CLOSED if is_closed else LEFT_TOO_MANY, transactions)
        return False

    def close(self, grace_s: float) -> None:
        """End what is in the background within `grace_s` seconds, and close the connections."""
        self.end_background(grace_s)
        self.disconnect()

    def end_background(self, grace_s: float) -> None:
        """Give background exchanges `grace_s` seconds, then end them, and say so in the log. From now on none begins.

        A request that is under way is waited for too, until its own time limit.
        """
        self._enter_process()
        with self._lock:
            self._closed_in = os.getpid()
            background, self._background = self._background, None
        if background is not None:
            background.close(grace_s)

    def disconnect(self) -> None:
        """Close the connections; the last request that is under way on them closes them otherwise."""
        self._enter_process()
        with self._lock:
            client, self._client = self._client, None
            is_used = client in self._asking
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
        client = self._taken()
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
        finally:
            self._leave(client)
        return answered(answer)

    def _taken(self) -> httpx.Client:
        """Return the client for a request, which must then leave it."""
        self._enter_process()
        with self._lock:
            if (client := self._client) is None:
                client = self._client = self._made()
            self._asking[client] = self._asking.get(client, 0) + 1
            return client

    def _leave(self, client: httpx.Client) -> None:
        with self._lock:
            left = self._asking.get(client, 1) - 1
            if left:
                self._asking[client] = left
                return
            self._asking.pop(client, None)
            if client is self._client:
                if not self._is_closed():
                    return
                self._client = None
        client.close()

    def _made(self) -> httpx.Client:
        return httpx.Client(
            headers=self._headers,
            transport=self._transport,
            limits=LIMITS,
            trust_env=False,
            verify=trusted(self._url),
        )

    def _is_closed(self) -> bool:
        return self._closed_in == os.getpid()

    def _enter_process(self) -> None:
        """Forget what belongs to the parent after a fork: its sockets stay open, and its threads do not exist here."""
        if self._process == os.getpid():
            return
        if self._process is not None:
            # Another thread may have held the lock at the fork.
            self._lock = threading.Lock()
        with self._lock:
            if self._process != os.getpid():
                self._client, self._background, self._asking = None, None, {}
                self._process = os.getpid()


@dataclass(eq=False)
class _Running:
    """An exchange in the background, and of how many transactions it is."""

    exchange: Exchange[Any]
    transactions: int


class Background:
    """One thread that runs exchanges when they are due; while one waits, others continue.

    The requests of those that are due at the same time are sent together.
    """

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver
        self._due: list[tuple[float, int, _Running, Any]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        # `until`: when the grace is over. After that nothing more is sent.
        self._closing, self._until, self._dropping = False, math.inf, False
        # Those that are neither due nor over: the thread works on them.
        self._under_way: set[_Running] = set()
        # When the request that is under way is over at the latest.
        self._over_by = 0.0
        self._thread = threading.Thread(target=self._work, name="halfnote-ends", daemon=True)
        self._thread.start()

    def add(self, exchange: Exchange[Any], transactions: int) -> bool:
        """Accept an exchange that has not begun; False if there are too many or the thread is closing."""
        with self._changed:
            if self._closing or len(self._due) >= BACKGROUND_MAX:
                return False
            self._put(time.monotonic(), _Running(exchange, transactions), None)
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
            self._changed.notify_all()
            over_by = self._over_by
        self._thread.join(max(0.0, over_by - time.monotonic()) + LATE_S)
        with self._changed:
            left = [*self._under_way, *(running for _, _, running, _ in self._due)]
            self._due.clear()
        if left:
            log.warning(LEFT_AT_CLOSE, sum(running.transactions for running in left))

    def _put(self, at: float, running: _Running, brought: Any) -> None:
        """Continue an exchange at a time. Called with the lock."""
        self._under_way.discard(running)
        heapq.heappush(self._due, (at, next(self._number), running, brought))
        self._changed.notify_all()

    def _next(self) -> list[tuple[_Running, Any]]:
        """Wait for exchanges that are due; return some of them, or none at the end."""
        with self._changed:
            while not self._dropping:
                if not self._due:
                    if self._closing:
                        return []
                    self._changed.wait()
                    continue
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s <= 0:
                    return self._taken()
                self._changed.wait(wait_s)
            return self._answered()

    def _taken(self) -> list[tuple[_Running, Any]]:
        found: list[tuple[_Running, Any]] = []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now and len(found) < TRANSACTIONS_MOST:
            _, _, running, brought = heapq.heappop(self._due)
            found.append((running, brought))
        self._under_way.update(running for running, _ in found)
        return found

    def _answered(self) -> list[tuple[_Running, Any]]:
        """Take those that an answer may have ended; the others are left."""
        found = [(running, brought) for _, _, running, brought in self._due if brought is not None]
        self._due = [one for one in self._due if one[3] is None]
        self._under_way.update(running for running, _ in found)
        return found

    def _work(self) -> None:
        while due := self._next():
            asking: list[tuple[_Running, Request]] = []
            for running, brought in due:
                effect = self._advanced(running.exchange, brought)
                if isinstance(effect, Request):
                    asking.append((running, effect))
                    continue
                with self._changed:
                    if effect is None:
                        self._under_way.discard(running)
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
            with self._changed:
                self._under_way.difference_update(running for running, _ in asking)
            return
        with self._changed:
            for (running, _), answer in zip(asking, answers, strict=True):
                self._put(time.monotonic(), running, answer)

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
