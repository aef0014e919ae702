"""Sends requests that wait at the same time as one, on threads."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from halfnote.batching import SLOW_S, UNDER_WAY_MOST, Single, combined, fitting, parted, too_late
from halfnote.exchange import SHORTEST_TIMEOUT_S, NoAnswer, Request, Response

Ask: TypeAlias = Callable[[Request], Response | NoAnswer]


class Batching:
    """Combines the requests of all threads. A thread that finds a free place sends for those that wait.

    A request has its place for `slow_s` seconds at most.
    """

    def __init__(self, ask: Ask, slow_s: float = SLOW_S) -> None:
        self._ask, self._slow_s = ask, slow_s
        self._single = Single(time.monotonic)
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, perhaps as a part of another one, and return its answer."""
        if not self._single.takes(request):
            return self._ask(request)
        with self._lock:
            lane = self._lanes.get(request.path)
            if lane is None:
                lane = self._lanes[request.path] = _Lane(self._ask, self._single, self._slow_s)
        return lane.ask(request)

    def ask_all(self, requests: Sequence[Request], ask: Ask) -> list[Response | NoAnswer]:
        """Send the requests of one thread by `ask`, together where they may be; return their answers in that order."""
        answers: dict[int, Response | NoAnswer] = {}
        together: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            if self._single.takes(request):
                together.setdefault(request.path, []).append(number)
            else:
                answers[number] = ask(request)
        for numbers in together.values():
            while numbers:
                count = fitting([len(requests[number].content) for number in numbers])
                some, numbers = numbers[:count], numbers[count:]
                came = _answers(ask, self._single, [requests[number] for number in some])
                answers.update(zip(some, came, strict=True))
        return [answers[number] for number in range(len(requests))]


class _Waiting:
    """A request of a thread that waits until a time at most.

    `came` None after `goes_on`: the thread has a place, and sends.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.until = time.monotonic() + request.timeout_s
        self.goes_on = threading.Event()
        self.came: Response | NoAnswer | None = None


class _Lane:
    """The requests of one path."""

    def __init__(self, ask: Ask, single: Single, slow_s: float) -> None:
        self._ask, self._single, self._slow_s = ask, single, slow_s
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        # When each request that is under way began, by the thread's own.
        self._under_way: dict[_Waiting, float] = {}

    def ask(self, request: Request) -> Response | NoAnswer:
        mine = _Waiting(request)
        with self._lock:
            sends = self._takes_place(mine)
            if not sends:
                self._waiting.append(mine)
        try:
            while not sends and not mine.goes_on.wait(max(0.0, min(self._slow_s, mine.until - time.monotonic()))):
                with self._lock:
                    if time.monotonic() >= mine.until and not mine.goes_on.is_set():
                        return self._ended(mine)
                    # Those under way may be slow by now. A request that another thread sends is no longer in the list.
                    sends = mine in self._waiting and self._takes_place(mine)
                    if sends:
                        self._waiting.remove(mine)
        except BaseException:
            # Such as KeyboardInterrupt, or the time limit of a task queue: the answer is no longer of use.
            self._give_up(mine)
            raise
        return self._send(mine) if mine.came is None else mine.came

    def _ended(self, mine: _Waiting) -> NoAnswer:
        """Return the outcome of a request whose time is over. Called with the lock."""
        waits = mine in self._waiting
        if waits:
            self._waiting.remove(mine)
        return too_late(mine.request, sent=not waits)

    def _takes_place(self, mine: _Waiting) -> bool:
        """Give a request a place if one is free. Called with the lock."""
        now = time.monotonic()
        is_free = sum(now - began < self._slow_s for began in self._under_way.values()) < UNDER_WAY_MOST
        if is_free:
            self._under_way[mine] = now
        return is_free

    def _give_up(self, mine: _Waiting) -> None:
        """Take back a request that is not under way, and give its place, if it has one, to the next."""
        with self._lock:
            if mine in self._waiting:
                self._waiting.remove(mine)
            self._leave(mine)

    def _leave(self, mine: _Waiting) -> None:
        """Give the place of a request to the next thread that waits. Called with the lock."""
        self._under_way.pop(mine, None)
        if self._waiting and self._takes_place(self._waiting[0]):
            self._waiting.pop(0).goes_on.set()

    def _send(self, mine: _Waiting) -> Response | NoAnswer:
        """Send this request and those that wait; then give the place to the next thread that waits.

        Not those that may take longer: this thread would wait for them beyond its own time.
        """
        with self._lock:
            others = [one for one in self._waiting if one.request.timeout_s <= mine.request.timeout_s]
            count = fitting([len(one.request.content) for one in (mine, *others)])
            sent, taken = [mine, *others[: count - 1]], set(others[: count - 1])
            self._waiting = [one for one in self._waiting if one not in taken]
            left_s = max(mine.until - time.monotonic(), SHORTEST_TIMEOUT_S)
        answers: Sequence[Response | NoAnswer] = [NoAnswer("the thread that sent it was stopped", sent=True)] * count
        try:
            answers = _answers(self._ask, self._single, [one.request for one in sent], left_s)
        finally:
            with self._lock:
                self._leave(mine)
            for one, came in zip(sent[1:], answers[1:], strict=True):
                one.came = came
                one.goes_on.set()
        return answers[0]


def _answers(
    ask: Ask, single: Single, requests: Sequence[Request], timeout_s: float = math.inf
) -> Sequence[Response | NoAnswer]:
    request = combined(requests)
    answers = parted(ask(replace(request, timeout_s=min(request.timeout_s, timeout_s))), len(requests))
    if answers is None:
        single.refused()
        answers = [ask(request) for request in requests]
    return answers
