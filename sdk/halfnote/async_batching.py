"""Sends requests that wait at the same time as one, on asyncio."""

import asyncio
import time
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, TypeAlias

from halfnote.batching import SLOW_S, UNDER_WAY_MOST, Single, combined, fitting, parted, too_late
from halfnote.exchange import NoAnswer, Request, Response

if TYPE_CHECKING:
    from halfnote.async_driver import Wire

_Waiting: TypeAlias = "tuple[Request, asyncio.Future[Response | NoAnswer], Context]"
_CLOSED = "the connections were closed"


class BatchingWire:
    """A wire that combines requests. It never waits for more of them: only for one of its own that is under way.

    After `slow_s` seconds it no longer waits for that one.
    """

    def __init__(self, wire: "Wire", slow_s: float = SLOW_S) -> None:
        self._wire, self._slow_s = wire, slow_s
        self._single = Single(time.monotonic)
        self._lanes: dict[str, _Lane] = {}

    async def ask(self, request: Request) -> Response | NoAnswer:
        """Send a request, perhaps as a part of another one, and return its answer."""
        if not self._single.takes(request):
            return await self._wire.ask(request)
        lane = self._lanes.get(request.path)
        if lane is None:
            lane = self._lanes[request.path] = _Lane(self._wire, self._single, self._slow_s)
        return await lane.ask(request)

    async def aclose(self) -> None:
        """Stop what waits and what is under way, and close the connections. Callers get no answer."""
        try:
            for lane in self._lanes.values():
                await lane.stop()
        finally:
            # Also if this is canceled, as at the end of `asyncio.run`.
            await self._wire.aclose()


class _Lane:
    """The requests of one path."""

    def __init__(self, wire: "Wire", single: Single, slow_s: float) -> None:
        self._wire, self._single, self._slow_s = wire, single, slow_s
        self._waiting: list[_Waiting] = []
        self._is_scheduled = self._is_stopped = False
        # The requests that are under way, and those of them that others wait for, until the timer of each.
        self._under_way: dict[asyncio.Task[None], list[_Waiting]] = {}
        self._awaited: dict[asyncio.Task[None], asyncio.TimerHandle] = {}

    async def ask(self, request: Request) -> Response | NoAnswer:
        if self._is_stopped:
            return NoAnswer(_CLOSED, sent=False)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Response | NoAnswer] = loop.create_future()
        mine = (request, answer, copy_context())
        self._waiting.append(mine)
        if not self._is_scheduled and len(self._awaited) < UNDER_WAY_MOST:
            # After the other callers that go on in this turn of the loop, as all do whose answers came together.
            self._is_scheduled = True
            loop.call_soon(self._send_waiting, context=Context())
        limit = loop.call_later(request.timeout_s, self._end_wait, mine, context=Context())
        try:
            return await answer
        finally:
            limit.cancel()

    async def stop(self) -> None:
        self._is_stopped = True
        _answer_all(self._waiting, NoAnswer(_CLOSED, sent=False))
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_wait(self, mine: _Waiting) -> None:
        """Answer a caller whose time is over; others may wait longer for the same request, or for a place."""
        request, answer, _ = mine
        if not answer.done():
            answer.set_result(too_late(request, sent=all(one is not mine for one in self._waiting)))

    def _send_waiting(self) -> None:
        self._is_scheduled = False
        # A caller that was canceled, or whose time is over, has sent nothing.
        self._waiting = [one for one in self._waiting if not one[1].done()]
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._awaited) < UNDER_WAY_MOST:
            count = fitting([len(request.content) for request, _, _ in self._waiting])
            sent, self._waiting = self._waiting[:count], self._waiting[count:]
            # Libraries that trace requests read the context of the task. A shared request has no caller's.
            context = sent[0][2] if count == 1 else Context()
            task = context.run(loop.create_task, self._send(sent))
            self._under_way[task] = sent
            self._awaited[task] = loop.call_later(self._slow_s, self._go_on_beside, task, context=Context())
            task.add_done_callback(self._over, context=Context())

    def _go_on_beside(self, task: "asyncio.Task[None]") -> None:
        del self._awaited[task]
        self._send_waiting()

    def _over(self, task: "asyncio.Task[None]") -> None:
        sent = self._under_way.pop(task)
        if task.cancelled() or task.exception() is not None:
            _answer_all(sent, NoAnswer(_CLOSED, sent=True))
        timer = self._awaited.pop(task, None)
        if timer is not None:
            timer.cancel()
        self._send_waiting()

    async def _send(self, sent: "list[_Waiting]") -> None:
        requests = [request for request, _, _ in sent]
        try:
            answers = parted(await self._wire.ask(combined(requests)), len(requests))
            if answers is None:
                self._single.refused()
                answers = list(await asyncio.gather(*[self._wire.ask(request) for request in requests]))
        except Exception as error:
            # As if the caller had sent it and got this.
            for _, answer, _ in sent:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer, _), came in zip(sent, answers, strict=True):
            if not answer.done():
                answer.set_result(came)


def _answer_all(waiting: "list[_Waiting]", came: NoAnswer) -> None:
    for _, answer, _ in waiting:
        if not answer.done():
            answer.set_result(came)
