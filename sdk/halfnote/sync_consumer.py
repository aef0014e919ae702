"""The consumer for threads: claims the messages of a subscription, for services without an endpoint."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any

import httpx

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
from halfnote.flag import Flag
from halfnote.hosting import not_awaitable
from halfnote.http import headers_of
from halfnote.inbox import Inbox, Reject
from halfnote.message import Message
from halfnote.queues import Queue, Queues
from halfnote.sync_driver import SyncDriver

log = logging.getLogger("halfnote")

# A thread cannot end its request, so `stop` waits for it.
WAIT_S = 4.0
# How often `close` looks whether the time of a message in the body of a loop is over, and a pause after a claim that
# failed, whether a handler raised.
LOOK_S = 0.5
POSTER = "halfnote-acknowledgements"


class SyncConsumer:
    """Claims messages of a subscription with the destination `pull`, up to `at_most` at once.

    They are this consumer's for `invisible_s` seconds, which is extended while the work goes on; after a crash they
    come again. Without `at_most` the service chooses, by default 10. Without `invisible_s` it is 60, or less if the
    service allows less; a value above what it allows is refused. Any number of consumers may share a subscription.
    `wait_s`: how long a claim waits for a message. `attempt_s`: for one request. `grace_s`: for how long a consumer
    that stops or closes tries to acknowledge and give back, if Halfnote does not answer; a request or a pause under way
    is finished. What is left comes again when its time is over. Use `with`, or `close` it.
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._consuming = Consuming(
            subscription, at_most, invisible_s, attempt_s, grace_s=grace_s, lock=threading.RLock()
        )
        self._driver = SyncDriver(url, headers_of(api_key), transport)
        self._wait_s = wait_s
        self._stopping, self._closing = Flag(), Flag()
        # The process that claims. What is held is its own, and its threads exist in no child.
        self._process: int | None = None
        # The threads on which `_close` is under way.
        self._closers: set[int] = set()
        # Set while no `run` is under way. `_closes_at_end`: one that is under way closes this consumer.
        self._idle, self._closes_at_end = Flag(), False
        self._idle.set()
        # Set while no loop over `messages` is under way. `_worked_on`: what the body of one works on, on which thread.
        self._loop_over = Flag()
        self._loop_over.set()
        self._worked_on: HeldMessage | None = None
        self._loop_thread: int | None = None
        self._is_closing = False
        # The threads of that `run`, by their identifiers: its own, and those of handlers.
        self._threads: set[int] = set()
        self._held: dict[str, HeldMessage] = {}
        # The handles of those that are being worked on. What is given back besides uses up no try.
        self._begun: set[str] = set()
        # Worked on, until the answer to their acknowledgement: they are held for longer as well.
        self._done: dict[str, HeldMessage] = {}
        self._to_acknowledge: list[HeldMessage] = []
        self._lock, self._posting = threading.RLock(), False
        self._poster = ThreadPoolExecutor(1, POSTER)
        self._acknowledging: Future[None] | None = None
        self._keeper: threading.Thread | None = None

    def messages(self) -> Iterator[Message]:
        """Yield messages, until `stop`; each is acknowledged after the body of the loop, while the next one is yielded.

        If the body raises, or leaves the loop, its message is given back as a failed attempt, and comes again as the
        subscription's `retry` says. So it does after `break`, also if its work is done: to end with a message that is
        acknowledged, call `stop` in the body. Those that were claimed with it are given back too, and use up no try.
        Raises Refused, for example if the subscription is not there, and RuntimeError in a child process of a fork.
        """
        self._enter_process()
        over = self._loop_over = Flag()
        self._loop_thread = threading.get_ident()
        try:
            self._give_back(None)
            while held := self._claim():
                for one in held:
                    if self._stopping.is_set():
                        return
                    if self._begins(one):
                        self._worked_on = one
                        yield one.message
                        self._enter_process()
                        self._worked_on, self._loop_thread = None, threading.get_ident()
                        self._acknowledge(one)
                self._acknowledged()
        finally:
            try:
                # An iterator that was left earlier ends late: what is held belongs to a newer loop.
                if self._loop_over is over:
                    self._worked_on = None
                    self._give_back(None)
                    if self._closes_at_end:
                        self._close(None)
            finally:
                over.set()

    def run(
        self,
        handler: Callable[..., Any],
        *,
        inbox: Inbox | None = None,
        at_once: int = 1,
    ) -> None:
        """Run `handler(message)`, or with an inbox `handler(message, connection)`, for each message, until `stop`.

        With an inbox each message has its effect once, in one database transaction with the message's row. An
        exception gives the message back, and the later ones of its key, which use up no try; Reject makes it a dead
        letter. `at_once`: how many handlers run at once, from 1; messages of a key are handled one after the other.
        While a handler has no message, more are claimed, unless `at_most` messages (10 without it) wait for earlier
        ones of their keys. Raises Refused, after the handlers under way, and RuntimeError in a child process of a fork.
        """
        self._enter_process()
        take = handler if inbox is None else partial(_received, inbox, handler)
        queues = Queues(at_once, self._consuming.at_most)
        # A signal's handler may call `close` on this thread, at any time.
        self._threads.add(threading.get_ident())
        self._idle.clear()
        try:
            self._run(take, queues, at_once)
        except BaseException as error:
            # Otherwise it would be held for longer and longer, until a close.
            try:
                self._give_back(error)
            except Exception:
                # What ends the run is more than what fails then.
                log.exception(NOT_GIVEN_BACK, self._consuming.subscription)
            raise
        finally:
            try:
                if self._closes_at_end:
                    self._close(None)
            finally:
                self._idle.set()
                self._threads.clear()

    def stop(self) -> None:
        """Claim no more. What is being worked on is finished and settled; the rest is given back, with its tries."""
        self._consuming.stop()
        self._stopping.set()

    def close(self, error: BaseException | None = None) -> None:
        """Stop, wait for the handlers of a `run` that is under way, and give back what is held; `error`: why.

        Called on a thread of that `run`, as by a handler or a signal, it leaves the rest to it: it closes at its end.
        So it does above another close of its thread, as in a signal's handler.
        It waits for the body of a loop over `messages` as well, but no longer than the message in it is held, which is
        not extended any more: up to `invisible_s` seconds. Called on the thread of the loop, it does not wait. The
        message in the body is acknowledged after the body; if its time is over by then, it comes again.
        In a child process of a fork it does nothing: what is held is the parent's.
        """
        if is_parents(self._process):
            return
        self.stop()
        if not self._idle.is_set() and threading.get_ident() in self._threads:
            self._closes_at_end = True
            return
        try:
            self._idle.wait()
            if threading.get_ident() != self._loop_thread:
                self._body_done()
        except BaseException:
            self._closes_at_end = True
            raise
        if self._loop_over.is_set():
            self._close(error)
            return
        if (one := self._worked_on) is not None:
            log.warning(WORKED_ON, one.message.message_id)
            self._close(error, but=one)
        self._closes_at_end = True
        if self._loop_over.is_set():
            # It ended meanwhile, and may have opened a connection again.
            self._close(error)

    def _enter_process(self) -> None:
        """Raise RuntimeError if another process claims."""
        require_own(self._process)
        self._process = os.getpid()

    def _body_done(self) -> None:
        """Wait until a loop over `messages` is over, or the time of the message in its body is."""
        self._is_closing = True
        left_s = LOOK_S
        while not self._loop_over.wait(left_s):
            one, left_s = self._worked_on, LOOK_S
            if one is not None and (left_s := min(left_s, one.until - time.monotonic())) <= 0:
                return

    def _close(self, error: BaseException | None, but: HeldMessage | None = None) -> None:
        """Give back what is held, `but` this one, and close the connections.

        A signal's handler may close above a line of this. It leaves the rest to this, and waits for none of its locks.
        """
        thread = threading.get_ident()
        if thread in self._closers or is_parents(self._process):
            return
        try:
            self._close_all(thread, error, but)
        finally:
            self._closers.discard(thread)

    def _close_all(self, thread: int, error: BaseException | None, but: HeldMessage | None) -> None:
        poster = self._poster
        try:
            self._closers.add(thread)
            self._closes_at_end = False
            if but is not None:
                # The loop may go on, and acknowledge. No thread begins before that.
                later = ThreadPoolExecutor(1, POSTER)
                with self._lock:
                    self._poster = later
            with self._consuming.hurrying():
                self._give_back(error, but)
                self._closing.set()
                if self._keeper is not None:
                    self._keeper.join(self._consuming.attempt_s)
            poster.shutdown()
        except BaseException:
            # Such as the SystemExit of a signal's handler, which has left its own close to this one.
            with self._consuming.hurrying():
                self._nack_held(error, but)
            raise
        finally:
            # After an exception of a signal's handler the threads end by themselves.
            self._closing.set()
            poster.shutdown(wait=False)
            self._driver.close(0)

    def _run(self, take: Callable[[Message], Any], queues: Queues, at_once: int) -> None:
        """Claim while a handler has nothing to work on, until the consumer stops; if a handler raises, none goes on."""
        self._give_back(None)
        leaves, failure = threading.Event(), None
        with ThreadPoolExecutor(at_once, "halfnote-consumer") as threads:
            handling: set[Future[None]] = set()
            try:
                while True:
                    while not queues.have_room() and not self._stopping.is_set():
                        done, handling = wait(handling, return_when=FIRST_COMPLETED)
                        raised_of(done)
                    try:
                        # What is acknowledged may free its key.
                        self._acknowledged()
                        found = self._claim(leaves)
                    except Exception as error:
                        # Also an answer that no service of Halfnote gives, as of a proxy: handlers go on.
                        log.error(ENDS, self._consuming.subscription, error_of(error))
                        found, failure = [], error
                    if not found:
                        break
                    for queue in queues.add(found):
                        handling.add(threads.submit(self._handle, queue, take, queues, leaves))
                    done = {one for one in handling if one.done()}
                    handling -= done
                    raised_of(done)
                raised_of(wait(handling).done)
            finally:
                # After an exception of this thread, such as KeyboardInterrupt, the executor waits for what has begun.
                leaves.set()
        if failure is not None:
            raise failure
        self._give_back(None)

    def _handle(self, queue: Queue, take: Callable[[Message], Any], queues: Queues, leaves: threading.Event) -> None:
        """Handle the messages of a queue; if that raises, such as SystemExit, no handler and no claim goes on."""
        self._threads.add(threading.get_ident())
        try:
            self._handle_each(queue, take, queues, leaves)
        except BaseException:
            leaves.set()
            raise

    def _handle_each(
        self, queue: Queue, take: Callable[[Message], Any], queues: Queues, leaves: threading.Event
    ) -> None:
        """Handle the messages of a queue; after one that failed, or that must not be begun, give the others back."""
        while not (leaves.is_set() or self._stopping.is_set()) and (one := queues.next(queue)) is not None:
            if not self._begins(one):
                if rest := self._of_held(queues.end(queue)):
                    self._settle("nack", rest, begun=False, error=NOT_BEGUN)
                return
            try:
                not_awaitable(take(one.message))
            except Reject as rejected:
                log.error("message %s was rejected: %s", one.message.message_id, rejected.reason)
                self._settle("reject", [one], reason=said(rejected.reason))
            except Exception as error:
                log.error("message %s failed", one.message.message_id, exc_info=error)
                for back in given_back(one, self._of_held(queues.end(queue)), error):
                    self._settle("nack", back.held, **back.fields)
                return
            else:
                self._acknowledge(one)

    def _of_held(self, messages: Sequence[HeldMessage]) -> list[HeldMessage]:
        return [one for one in messages if one.handle in self._held]

    def _begins(self, one: HeldMessage) -> bool:
        """Begin the work on a message, or give back what must not be begun any more and return False."""
        if one.handle in self._held and self._consuming.may_begin(one):
            self._begun.add(one.handle)
            return True
        if over := self._consuming.over(self._held, self._begun):
            self._settle("nack", over, begun=False, error=NOT_BEGUN)
        return False

    def _acknowledge(self, one: HeldMessage) -> None:
        """Begin to acknowledge a message: at once, or with others that wait for the answer to the request before."""
        self._enter_process()
        with self._lock:
            self._held.pop(one.handle, None)
            self._done[one.handle] = one
            self._to_acknowledge.append(one)
            if not self._posting:
                self._posting = True
                self._acknowledging = self._poster.submit(self._acknowledge_waiting)

    def _acknowledge_waiting(self) -> None:
        while True:
            with self._lock:
                waiting, self._to_acknowledge = self._to_acknowledge, []
                self._posting = bool(waiting)
            if not waiting:
                return
            try:
                self._settle("ack", waiting)
            except BaseException:
                with self._lock:
                    self._posting = False
                raise

    def _acknowledged(self) -> None:
        """Wait until nothing is left to acknowledge."""
        with self._lock:
            over, self._acknowledging = self._acknowledging, None
        if over is not None:
            over.result()

    def _claim(self, leaves: threading.Event | None = None) -> list[HeldMessage]:
        """Return claimed messages; none if the consumer stops, or `leaves` is set. Raises Refused."""
        failed = 0
        while not (self._stopping.is_set() or (leaves is not None and leaves.is_set())):
            try:
                found = self._driver.run(self._consuming.claimed(self._wait_s))
            except Unconfirmed as error:
                failed += 1
                log.warning(FAILED, self._consuming.subscription, paused_s(failed, error), error)
                self._pause(paused_s(failed, error), leaves)
                continue
            failed = 0
            if found:
                self._held.update({one.handle: one for one in found})
                if self._keeper is None:
                    self._keeper = threading.Thread(target=self._keep, name="halfnote-leases", daemon=True)
                    self._keeper.start()
            self._driver.run(self._consuming.unreadable_given_back())
            if found:
                return found
        return []

    def _pause(self, seconds: float, leaves: threading.Event | None) -> None:
        """Wait so long, or until the consumer stops or `leaves` is set."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            # Only one event can be waited for.
            if self._stopping.wait(min(left_s, LOOK_S)) or (leaves is not None and leaves.is_set()):
                return

    def _keep(self) -> None:
        """Extend the lease of what is held; forget what is not held any more."""
        while not self._closing.wait(self._consuming.invisible_s * EXTENDED_AFTER):
            held = [*self._done.values(), *self._held.values()]
            if self._is_closing:
                held = [one for one in held if one is not self._worked_on]
            if not held:
                continue
            try:
                lost = self._driver.run(self._consuming.extended(held))
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

    def _settle(self, act: str, held: Sequence[HeldMessage], **fields: Any) -> None:
        """Settle messages. What fails is logged: they come again."""
        self._enter_process()
        for one in held:
            self._held.pop(one.handle, None)
            self._begun.discard(one.handle)
        try:
            lost = self._driver.run(self._consuming.settled(act, held, **fields))
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

    def _give_back(self, error: BaseException | None, but: HeldMessage | None = None) -> None:
        if is_parents(self._process):
            return
        with self._consuming.hurrying():
            self._give_back_held(error, but)

    def _give_back_held(self, error: BaseException | None, but: HeldMessage | None) -> None:
        try:
            self._acknowledged()
        except Exception:
            self._nack_held(error, but)
            raise
        self._nack_held(error, but)

    def _nack_held(self, error: BaseException | None, but: HeldMessage | None) -> None:
        # At once: a loop that is left and `close` may both give back. The list is made in one step, because the thread
        # that holds messages for longer takes out what is lost.
        left, self._held = list(self._held.values()), still_held(self._held, but)
        held = [one for one in left if one is not but]
        why = "the consumer stopped" if error is None else error_of(error)
        begun = [one for one in held if one.handle in self._begun]
        rest = [one for one in held if one.handle not in self._begun]
        if begun:
            self._settle("nack", begun, **again_of(error, KeyboardInterrupt), error=why)
        if rest:
            self._settle("nack", rest, begun=False, error=why)

    def __enter__(self) -> "SyncConsumer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._idle.is_set() and threading.get_ident() == self._loop_thread:
            # The block was left, and with it the loop in it.
            self.stop()
            self._close(error)
        else:
            self.close(error)


def raised_of(done: Collection[Future[None]]) -> None:
    """Raise what one of these raised."""
    for one in done:
        one.result()


def _received(inbox: Inbox, handler: Callable[..., Any], message: Message) -> None:
    inbox.receive(message, handler)
