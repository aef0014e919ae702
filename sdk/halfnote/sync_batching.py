"""Sends requests that wait at the same time as one, on threads."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from halfnote.batching import SLOW_S, UNDER_WAY_MOST, Single, combined, fitting, parted
from halfnote.exchange import NoAnswer, Request, Response

_Ask: TypeAlias = Callable[[Request], Response | NoAnswer]


class Batching:
    """Combines the requests of all threads. A thread that finds a free place sends for those that wait.

    A request has its place for `slow_s` seconds at most.
    """

    def __init__(self, ask: _Ask, slow_s: float = SLOW_S) -> None:
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

    def ask_all(self, requests: Sequence[Request]) -> list[Response | NoAnswer]:
        """Send the requests of one thread, together where they may be; return their answers in the same order."""
        answers: dict[int, Response | NoAnswer] = {}
        together: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            if self._single.takes(request):
                together.setdefault(request.path, []).append(number)
            else:
                answers[number] = self._ask(request)
        for numbers in together.values():
            while numbers:
                count = fitting([len(requests[number].content) for number in numbers])
                some, numbers = numbers[:count], numbers[count:]
                came = _answers(self._ask, self._single, [requests[number] for number in some])
                answers.update(zip(some, came, strict=True))
        return [answers[number] for number in range(len(requests))]


class _Waiting:
    """A request of a thread that waits. `came` None after `goes_on`: the thread has a place, and sends."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.goes_on = threading.Event()
        self.came: Response | NoAnswer | None = None


class _Lane:
    """The requests of one path."""

    def __init__(self, ask: _Ask, single: Single, slow_s: float) -> None:
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
            while not sends and not mine.goes_on.wait(self._slow_s):
                with self._lock:
                    # Those under way may be slow by now. A request that another thread sends is no longer in the list.
                    sends = mine in self._waiting and self._takes_place(mine)
                    if sends:
                        self._waiting.remove(mine)
        except BaseException:
            # Such as KeyboardInterrupt, or the time limit of a task queue: the answer is no longer of use.
            self._give_up(mine)
            raise
        return self._send(mine) if mine.came is None else mine.came

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
        """Send this request and those that wait; then give the place to the next thread that waits."""
        with self._lock:
            count = fitting([len(one.request.content) for one in (mine, *self._waiting)])
            sent, self._waiting = [mine, *self._waiting[: count - 1]], self._waiting[count - 1 :]
        answers: Sequence[Response | NoAnswer] = [NoAnswer("the thread that sent it was stopped", sent=True)] * count
        try:
            answers = _answers(self._ask, self._single, [one.request for one in sent])
        finally:
            with self._lock:
                self._leave(mine)
            for one, came in zip(sent[1:], answers[1:], strict=True):
                one.came = came
                one.goes_on.set()
        return answers[0]


def _answers(ask: _Ask, single: Single, requests: Sequence[Request]) -> Sequence[Response | NoAnswer]:
    answers = parted(ask(combined(requests)), len(requests))
    if answers is None:
        single.refused()
        answers = [ask(request) for request in requests]
    return answers
