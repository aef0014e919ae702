"""The asynchronous consumer: claims the messages of a subscription, for services without an endpoint."""

import asyncio
import logging
import os
import sys
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import httpx

from halfnote.async_driver import AsyncDriver
from halfnote.claiming import paused_s
from halfnote.consuming import (
    ENDS,
    EXTENDED_AFTER,
    FAILED,
    GRACE_S,
    LEFT,
    NOT_BEGUN,
    NOT_GIVEN_BACK,
    WORKED_ON,
    Consuming,
    HeldMessage,
    again_of,
    error_of,
    given_back,
    is_parents,
    require_own,
    said,
    still_held,
)
from halfnote.errors import HalfnoteError, Unconfirmed
from halfnote.http import headers_of
from halfnote.inbox import AsyncInbox, Reject
from halfnote.message import Message
from halfnote.queues import Queue, Queues
from halfnote.time_limits import unless_stopped

log = logging.getLogger("halfnote")

WAIT_S = 20.0
# How often `close` looks whether the time of a message in the body of a loop is over.
LOOK_S = 0.5
# The consumers whose handlers the running code belongs to, and the ends of the loops whose bodies it belongs to. A task
# that a handler or a body starts belongs to it as well.
_handles: ContextVar[tuple["Consumer | asyncio.Event", ...]] = ContextVar("halfnote_consumers", default=())


class Consumer:
    """Claims messages of a subscription with the destination `pull`, up to `at_most` at once.

    They are this consumer's for `invisible_s` seconds, which is extended while the work goes on; after a crash they
    come again. Without `at_most` the service chooses, by default 10. Without `invisible_s` it is 60, or less if the
    service allows less; a value above what it allows is refused. Any number of consumers may share a subscription.
    `wait_s`: how long a claim waits for a message. `attempt_s`: for one request. `grace_s`: for how long a consumer
    that stops or closes tries to acknowledge and give back, if Halfnote does not answer; a request or a pause under way
    is finished. What is left comes again when its time is over. Use `async with`, or `close` it.
    It may be made before a fork. A child of a process that has called `messages` or `run` needs a consumer of its own.
    """

    def __init__(
        self,
        url: str,
        subscription: str,
        *,
        at_most: int | None = None,
        invisible_s: float | None = None,
        wait_s: float = WAIT_S,
        attempt_s: float = 5.0,
        grace_s: float = GRACE_S,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._consuming = Consuming(subscription, at_most, invisible_s, attempt_s, grace_s=grace_s)
        self._driver = AsyncDriver(url, headers_of(api_key), transport)
        self._wait_s = wait_s
        self._stopping = asyncio.Event()
        # The process that claims, and its loop. What is held is that process's own.
        self._process: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set while no `run` is under way. `_closes_at_end`: one that is under way closes this consumer.
        self._idle, self._closes_at_end = asyncio.Event(), False
        self._idle.set()
        # Set while no loop over `messages` is under way. `_worked_on`: what the body of one works on.
        self._loop_over = asyncio.Event()
        self._worked_on: HeldMessage | None = None
        self._loop_over.set()
        self._is_closing = False
        self._held: dict[str, HeldMessage] = {}
        # The handles of those that are being worked on. What is given back besides uses up no try.
        self._begun: set[str] = set()
        # Worked on, until the answer to their acknowledgement: they are held for longer as well.
        self._done: dict[str, HeldMessage] = {}
        self._to_acknowledge: list[HeldMessage] = []
        self._acknowledging: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    def messages(self) -> AsyncIterator[Message]:
        """Yield messages, until `stop`; each is acknowledged after the body of the loop, while the next one is yielded.

        If the body raises, or leaves the loop, its message is given back as a failed attempt, and comes again as the
        subscription's `retry` says. So it does after `break`, also if its work is done: to end with a message that is
        acknowledged, call `stop` in the body. Those that were claimed with it are given back too, and use up no try.
        Raises Refused, for example if the subscription is not there, and RuntimeError in a child process of a fork.
        """
        over = asyncio.Event()
        loop = self._messages(over)
        # A loop that was left by `break` is over as well: nothing has its iterator any more.
        self._watched = weakref.ref(loop, lambda _: over.set())
        return loop

    async def _messages(self, over: asyncio.Event) -> AsyncGenerator[Message, None]:
        self._begin_on_loop()
        self._loop_over = over
        # So is one whose task has ended, although something has its iterator.
        ended = lambda _: over.set()  # noqa: E731
        try:
            await self._give_back(None)
            while held := await self._claim():
                for one in held:
                    if self._stopping.is_set():
                        return
                    if await self._begins(one):
                        task, self._worked_on = asyncio.current_task(), one
                        assert task is not None
                        task.add_done_callback(ended)
                        # A loop that was left by `break` did not take its end away.
                        rest = (other for other in _handles.get() if isinstance(other, Consumer) or not other.is_set())
                        _handles.set((*rest, over))
                        yield one.message
                        _handles.set(tuple(other for other in _handles.get() if other is not over))
                        task.remove_done_callback(ended)
                        over.clear()
                        self._worked_on = None
                        await self._acknowledge(one)
                await self._acknowledged()
        finally:
            try:
                # An iterator that was left earlier ends late: what is held belongs to a newer loop.
                if self._loop_over is over:
                    self._worked_on = None
                    await self._give_back(None)
                    if self._closes_at_end:
                        await self._close(None)
            finally:
                over.set()

    async def run(
        self,
        handler: Callable[..., Awaitable[Any]],
        *,
        inbox: AsyncInbox | None = None,
        at_once: int = 1,
    ) -> None:
        """Run `handler(message)`, or with an inbox `handler(message, connection)`, for each message, until `stop`.

        With an inbox each message has its effect once, in one database transaction with the message's row. An
        exception gives the message back, and the later ones of its key, which use up no try; Reject makes it a dead
        letter. `at_once`: how many handlers run at once, from 1; messages of a key are handled one after the other.
        While a handler has no message, more are claimed, unless `at_most` messages (10 without it) wait for earlier
        ones of their keys. Raises Refused, after the handlers under way, and RuntimeError in a child process of a fork.
        """
        take = handler if inbox is None else partial(_received, inbox, handler)
        queues = Queues(at_once, self._consuming.at_most)
        self._begin_on_loop()
        self._idle.clear()
        try:
            await self._give_back(None)
            await self._run(take, queues, asyncio.Semaphore(at_once))
            await self._give_back(None)
        except BaseException as error:
            # Otherwise it would be held for longer and longer, until a close.
            try:
                await self._give_back(error)
            except Exception:
                # What ends the run is more than what fails then.
                log.exception(NOT_GIVEN_BACK, self._consuming.subscription)
            raise
        finally:
            try:
                if self._closes_at_end:
                    await self._close(None)
            finally:
                self._idle.set()

    def stop(self) -> None:
        """Claim no more. What is being worked on is finished and settled; the rest is given back, with its tries.

        A signal's handler may call it, if the event loop runs on the main thread.
        """
        self._consuming.stop()
        self._stopping.set()
        loop = self._loop
        if loop is not None and not loop.is_closed():
            # A signal's handler does not wake a loop that waits for its connections.
            loop.call_soon_threadsafe(lambda: None)

    async def close(self, error: BaseException | None = None) -> None:
        """Stop, wait for the handlers of a `run` that is under way, and give back what is held; `error`: why.

        Called by a handler, or canceled while it waits, it leaves the rest to that `run`, which closes at its end.
        It waits for the body of a loop over `messages` as well, but no longer than the message in it is held, which is
        not extended any more: up to `invisible_s` seconds. Called by the body, it does not wait. The message in the
        body is acknowledged after the body; if its time is over by then, it comes again.
        In a child process of a fork it does nothing: what is held is the parent's.
        """
        if is_parents(self._process):
            return
        self.stop()
        if self in _handles.get() and not self._idle.is_set():
            self._closes_at_end = True
            return
        try:
            await self._idle.wait()
            if self._loop_over not in _handles.get():
                await self._body_done()
        except BaseException:
            self._closes_at_end = True
            raise
        if self._loop_over.is_set():
            await self._close(error)
            return
        if self._worked_on is not None:
            log.warning(WORKED_ON, self._worked_on.message.message_id)
            await self._close(error, but=self._worked_on)
        self._closes_at_end = True
        if self._loop_over.is_set():
            # It ended meanwhile, and may have opened a connection again.
            await self._close(error)

    async def _body_done(self) -> None:
        """Wait until a loop over `messages` is over, or the time of the message in its body is."""
        self._is_closing = True
        while not self._loop_over.is_set():
            one, left_s = self._worked_on, LOOK_S
            if one is not None and (left_s := min(left_s, one.until - time.monotonic())) <= 0:
                return
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._loop_over.wait(), left_s)

    async def _close(self, error: BaseException | None, but: HeldMessage | None = None) -> None:
        """Give back what is held, `but` this one, and close the connections."""
        if is_parents(self._process):
            return
        self._closes_at_end = False
        try:
            await self._give_back(error, but)
        finally:
            # Also if this is canceled, once or twice.
            keeper, self._keeper = self._keeper, None
            try:
                if keeper is not None:
                    keeper.cancel()
                    await asyncio.gather(keeper, return_exceptions=True)
            finally:
                await self._driver.close(0)

    def _begin_on_loop(self) -> None:
        """Claim on the running loop. Events and tasks of a loop that was closed, as by `asyncio.run`, are of no use."""
        require_own(self._process)
        self._process = os.getpid()
        former, self._loop = self._loop, asyncio.get_running_loop()
        if former is None or not former.is_closed():
            return
        self._stopping, was_stopping = asyncio.Event(), self._stopping.is_set()
        if was_stopping:
            self._stopping.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._keeper = self._acknowledging = None

    async def _run(self, take: Callable[[Message], Awaitable[Any]], queues: Queues, places: asyncio.Semaphore) -> None:
        """Claim while a handler has nothing to work on, until the consumer stops; if a handler raises, none goes on."""
        handling: set[asyncio.Task[None]] = set()
        claiming: asyncio.Task[list[HeldMessage]] | None = None
        is_over, failure = False, None
        try:
            while True:
                if claiming is None and not is_over and queues.have_room():
                    claiming = asyncio.ensure_future(self._claim_next())
                under_way = handling if claiming is None else {*handling, claiming}
                if not under_way:
                    break
                done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for ended in handling & done:
                    handling.discard(ended)
                    ended.result()
                if claiming is None or claiming not in done:
                    continue
                try:
                    found = claiming.result()
                except Exception as error:
                    # Also an answer that no service of Halfnote gives, as of a proxy: handlers are not canceled.
                    log.error(ENDS, self._consuming.subscription, error_of(error))
                    found, failure = [], error
                claiming, is_over = None, not found
                handling |= {
                    asyncio.ensure_future(self._handle(queue, take, queues, places)) for queue in queues.add(found)
                }
        finally:
            left = [*handling] if claiming is None else [*handling, claiming]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if failure is not None:
            raise failure

    async def _claim_next(self) -> list[HeldMessage]:
        # What is acknowledged may free its key.
        await self._acknowledged()
        return await self._claim()

    async def _handle(
        self, queue: Queue, take: Callable[[Message], Awaitable[Any]], queues: Queues, places: asyncio.Semaphore
    ) -> None:
        """Handle the messages of a queue; after one that failed, or that must not be begun, give the others back."""
        _handles.set((*_handles.get(), self))
        async with places:
            while not self._stopping.is_set() and (one := queues.next(queue)) is not None:
                if not await self._begins(one):
                    if rest := self._of_held(queues.end(queue)):
                        await self._settle("nack", rest, begun=False, error=NOT_BEGUN)
                    return
                try:
                    await take(one.message)
                except Reject as rejected:
                    log.error("message %s was rejected: %s", one.message.message_id, rejected.reason)
                    await self._settle("reject", [one], reason=said(rejected.reason))
                except (Exception, asyncio.CancelledError) as error:
                    if isinstance(error, asyncio.CancelledError) and _is_canceled():
                        raise
                    log.error("message %s failed", one.message.message_id, exc_info=error)
                    for back in given_back(one, self._of_held(queues.end(queue)), error):
                        await self._settle("nack", back.held, **back.fields)
                    return
                else:
                    await self._acknowledge(one)

    def _of_held(self, messages: Sequence[HeldMessage]) -> list[HeldMessage]:
        return [one for one in messages if one.handle in self._held]

    async def _begins(self, one: HeldMessage) -> bool:
        """Begin the work on a message, or give back what must not be begun any more and return False."""
        if one.handle in self._held and self._consuming.may_begin(one):
            self._begun.add(one.handle)
            return True
        if over := self._consuming.over(self._held, self._begun):
            await self._settle("nack", over, begun=False, error=NOT_BEGUN)
        return False

    async def _acknowledge(self, one: HeldMessage) -> None:
        """Begin to acknowledge a message: at once, or with others that wait for the answer to the request before."""
        self._held.pop(one.handle, None)
        self._done[one.handle] = one
        self._to_acknowledge.append(one)
        if self._acknowledging is None or self._acknowledging.done():
            self._acknowledging = asyncio.get_running_loop().create_task(self._acknowledge_waiting())
        # The request begins, also if the work on the next message never waits.
        await asyncio.sleep(0)

    async def _acknowledge_waiting(self) -> None:
        while self._to_acknowledge:
            waiting, self._to_acknowledge = self._to_acknowledge, []
            await self._settle("ack", waiting)

    async def _acknowledged(self) -> None:
        """Wait until nothing is left to acknowledge."""
        task = self._acknowledging
        if task is not None:
            # Unlike an await of the task, it goes on if this one is cancelled.
            await asyncio.wait([task])
            # A loop that is left and `close` may wait at the same time.
            if self._acknowledging is task:
                self._acknowledging = None
            task.result()

    async def _claim(self) -> list[HeldMessage]:
        """Return claimed messages; none if the consumer stops. Raises Refused."""
        failed = 0
        while not self._stopping.is_set():
            try:
                found = await unless_stopped(self._claimed(), self._stopping, stays_if_canceled=True)
            except Unconfirmed as error:
                if self._stopping.is_set():
                    break
                failed += 1
                log.warning(FAILED, self._consuming.subscription, paused_s(failed, error), error)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), paused_s(failed, error))
                continue
            failed = 0
            if found:
                return found
        return []

    async def _claimed(self) -> list[HeldMessage]:
        """Claim, and hold what was claimed at once: this may be canceled, or the consumer stopped, as it ends."""
        found = await self._driver.run(self._consuming.claimed(self._wait_s))
        self._held.update({one.handle: one for one in found})
        if found and self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
        await self._driver.run(self._consuming.unreadable_given_back())
        return found

    async def _keep(self) -> None:
        """Extend the lease of what is held; forget what is not held any more."""
        while True:
            await asyncio.sleep(self._consuming.invisible_s * EXTENDED_AFTER)
            held = [*self._done.values(), *self._held.values()]
            if self._is_closing:
                held = [one for one in held if one is not self._worked_on]
            if not held:
                continue
            try:
                lost = await self._driver.run(self._consuming.extended(held))
            except HalfnoteError as error:
                log.warning("%s", error)
                continue
            except Exception:
                # An answer that no service of Halfnote gives, as of a proxy. The lease must be extended all the same.
                log.exception("leases were not extended")
                continue
            for one in lost:
                # One that is being acknowledged is lost only if that is refused.
                if self._held.pop(one.handle, None) is not None:
                    one.lane.is_lost = True

    async def _settle(self, act: str, held: Sequence[HeldMessage], **fields: Any) -> None:
        """Settle messages. What fails is logged: they come again."""
        for one in held:
            self._held.pop(one.handle, None)
            self._begun.discard(one.handle)
        try:
            lost = await self._driver.run(self._consuming.settled(act, held, **fields))
        except HalfnoteError as error:
            lost, why = list(held), str(error)
        else:
            why = "their time was over"
        finally:
            for one in held:
                self._done.pop(one.handle, None)
        for one in lost:
            one.lane.is_lost = True
        if lost:
            log.warning(LEFT, len(lost), why, ", ".join(one.message.message_id for one in lost))

    async def _give_back(self, error: BaseException | None, but: HeldMessage | None = None) -> None:
        with self._consuming.hurrying():
            await self._give_back_held(error, but)

    async def _give_back_held(self, error: BaseException | None, but: HeldMessage | None) -> None:
        try:
            await self._acknowledged()
        except Exception:
            # Not after another cancellation, which is to end this at once.
            await self._nack_held(error, but)
            raise
        await self._nack_held(error, but)

    async def _nack_held(self, error: BaseException | None, but: HeldMessage | None) -> None:
        held = [one for one in self._held.values() if one is not but]
        # At once: a loop that is left and `close` may both give back.
        self._held = still_held(self._held, but)
        why = "the consumer stopped" if error is None else error_of(error)
        begun = [one for one in held if one.handle in self._begun]
        rest = [one for one in held if one.handle not in self._begun]
        if begun:
            await self._settle("nack", begun, **again_of(error, asyncio.CancelledError), error=why)
        if rest:
            await self._settle("nack", rest, begun=False, error=why)

    async def __aenter__(self) -> "Consumer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._idle.is_set() and self._loop_over in _handles.get():
            # The block was left, and with it the loop in it.
            self.stop()
            await self._close(error)
        else:
            await self.close(error)


def _is_canceled() -> bool:
    """Return whether the running task is being canceled, and not only something that its handler awaited."""
    if sys.version_info >= (3, 11):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    # Python 3.10 does not tell.
    return True


async def _received(inbox: AsyncInbox, handler: Callable[..., Awaitable[Any]], message: Message) -> None:
    await inbox.receive(message, handler)
