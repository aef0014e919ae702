"""Sends requests that wait at the same time as one, on threads."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from halfnote.batching import UNDER_WAY_MOST, Single, combined, fitting, parted
from halfnote.exchange import NoAnswer, Request, Response

_Ask: TypeAlias = Callable[[Request], Response | NoAnswer]


class Batching:
    """Combines the requests of all threads. A thread that finds a free place sends for those that wait."""

    def __init__(self, ask: _Ask) -> None:
        self._ask = ask
        self._single = Single(time.monotonic)
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}

    def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, perhaps as a part of another one, and return its answer."""
        if not self._single.takes(request):
            return self._ask(request)
        with self._lock:
            lane = self._lanes.setdefault(request.path, _Lane(self._ask, self._single))
        return lane.ask(request)


class _Waiting:
    """A request of a thread that waits. `came` None after `goes_on`: the thread has a place, and sends."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.goes_on = threading.Event()
        self.came: Response | NoAnswer | None = None


class _Lane:
    """The requests of one path."""

    def __init__(self, ask: _Ask, single: Single) -> None:
        self._ask, self._single = ask, single
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._under_way = 0

    def ask(self, request: Request) -> Response | NoAnswer:
        mine = _Waiting(request)
        with self._lock:
            sends = self._under_way < UNDER_WAY_MOST
            if sends:
                self._under_way += 1
            else:
                self._waiting.append(mine)
        if not sends:
            mine.goes_on.wait()
            if mine.came is not None:
                return mine.came
        return self._send(mine)

    def _send(self, mine: _Waiting) -> Response | NoAnswer:
        """Send this request and those that wait; then give the place to the next thread that waits."""
        with self._lock:
            count = fitting([len(one.request.content) for one in (mine, *self._waiting)])
            sent, self._waiting = [mine, *self._waiting[: count - 1]], self._waiting[count - 1 :]
        answers: Sequence[Response | NoAnswer] = [NoAnswer("the thread that sent it was stopped", sent=True)] * count
        try:
            answers = self._answers([one.request for one in sent])
        finally:
            with self._lock:
                if self._waiting:
                    self._waiting.pop(0).goes_on.set()
                else:
                    self._under_way -= 1
            for one, came in zip(sent[1:], answers[1:], strict=True):
                one.came = came
                one.goes_on.set()
        return answers[0]

    def _answers(self, requests: Sequence[Request]) -> Sequence[Response | NoAnswer]:
        answers = parted(self._ask(combined(requests)), len(requests))
        if answers is None:
            self._single.refused()
            answers = [self._ask(request) for request in requests]
        return answers
