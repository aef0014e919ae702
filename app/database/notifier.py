"""Wakes relays when messages were published: at once in this process, by a coalesced NOTIFY in the others.

An API process with a worker beside it leaves both to the worker (app/runtime/wake_up_socket.py).

A wake-up is a hint: a relay that misses one reads the log at its next poll. A relay is woken only for topics that its
streams take; a turn for each commit would cost the caller who commits next, for nothing.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.database.connection import Connection, Database
from app.topic_patterns import TopicPatterns

CHANNEL = "halfnote_outbox"
# NOTIFY takes a lock that all notifying commits share, so it is sent seldom, and never by a flush itself.
NOTIFY_EVERY_S = 0.02
# Postgres takes payloads of less than 8000 bytes; an empty one stands for any topic.
PAYLOAD_MAX_BYTES = 7_000
# A server that is frozen or gone does not answer.
ANSWER_WITHIN_S = 10.0
NOTIFY = "select pg_notify($1, $2)"
# Sent as a topic, which no message has: consumers may claim more than before, such as the next message of a key.
CLAIMABLE = "halfnote.claimable"


@dataclass(frozen=True, slots=True)
class Woken:
    """Why a relay takes a turn.

    `published`: there is something to read. `looks`: there may be. `idle`: nothing woke it.
    """

    published: bool
    looks: bool
    idle: bool


class Worker(Protocol):
    """The worker process beside this one, which wakes its own relay and notifies others."""

    def published(self, topics: Collection[str] | None, messages: Sequence[Any] = (), complete: bool = False) -> None:
        """Tell the worker what was published: topics, and messages as app/runtime/publications.py has them."""


class WakeUps:
    """`published()` is called after a flush that published; `relay` is set for this process's relay.

    `interest` is what that relay's streams take; while it is None, every publication wakes the relay. `elsewhere` is
    what the streams of other processes may take; while it is None, other processes are notified of every publication.
    If `worker` is not None, the topics go to the worker, and no NOTIFY is sent.
    """

    def __init__(self, database: Database) -> None:
        self.relay = asyncio.Event()
        # Set while a NOTIFY is due: it wakes the loop that sends it.
        self.notify_due = asyncio.Event()
        self.interest: TopicPatterns | None = None
        self.elsewhere: TopicPatterns | None = None
        self.worker: Worker | None = None
        # Called for each publication, of this process or another: consumers may wait here.
        self.on_wake: Callable[[], None] | None = None
        self._database = database
        # Since the relay's last turn: whether something was published for it, and whether it asked for a turn itself.
        self._unread = self._requested = False
        # What was published since the last NOTIFY: topics, or that some are not known.
        self._topics: set[str] = set()
        self._any = False
        self._notifying: Connection | None = None
        self._listener: Connection | None = None
        self._listening = False

    def timeline(self) -> int | None:
        """Return the highest timeline that this process has seen; None if it can read none."""
        highest = self._database.guard.highest
        return None if highest is None else highest.number

    def published(
        self,
        topics: Collection[str] | None = None,
        messages: Sequence[Any] = (),
        complete: bool = False,
        *,
        taken: bool = False,
    ) -> None:
        """Wake this process's relay if it takes one of the topics (None: any), and have the others notified soon.

        `messages` go to the worker beside this process, if there is one; with `complete` they are all that was
        published. With `taken` this process's relay has got all messages already.
        """
        self._wake(topics, taken=taken)
        if self.worker is not None:
            self.worker.published(topics, messages, complete)
        elif self.elsewhere is None or self._taken_elsewhere(self.elsewhere, topics):
            self.notify_soon(topics)

    def claimable(self) -> None:
        """Let the consumers that wait here or at other processes look again: a key is free, or a message came back."""
        if self.on_wake is not None:
            self.on_wake()
        if self.worker is not None:
            self.worker.published([CLAIMABLE])
        elif self.elsewhere is None or self._taken_elsewhere(self.elsewhere, [CLAIMABLE]):
            self.notify_soon([CLAIMABLE])

    def notify_soon(self, topics: Collection[str] | None) -> None:
        """Have other processes notified soon that the topics (None: any) were published."""
        if topics is None:
            self._any = True
        else:
            self._topics.update(topics)
        self.notify_due.set()

    def request_turn(self) -> None:
        """Wake this process's relay because it has something to record. The log is not read for it."""
        self._requested = True
        self.relay.set()

    def wake(self) -> None:
        """Wake this process's relay because there may be something to read."""
        self._unread = True
        self.relay.set()

    def take(self) -> Woken:
        """Return why the relay takes the turn that begins now."""
        woken = Woken(self._unread, self._unread or not self._requested, idle=not (self._unread or self._requested))
        self._unread = self._requested = False
        return woken

    def _wake(self, topics: Collection[str] | None, *, taken: bool = False) -> None:
        if self.on_wake is not None:
            self.on_wake()
        if taken:
            return
        if topics is None or self.interest is None or self.interest.match_any(topics):
            self.wake()

    def _taken_elsewhere(self, elsewhere: TopicPatterns, topics: Collection[str] | None) -> bool:
        return bool(elsewhere.patterns) if topics is None else elsewhere.match_any(topics)

    async def notify(self) -> bool:
        """Send one NOTIFY if anything was published since the last, then rest 20 ms; return whether it was sent.

        Raises what asyncpg does; the next call connects again.
        """
        if not (self._topics or self._any):
            return False
        if self._notifying is None:
            self._notifying = await self._database.dedicated(answer_within_s=ANSWER_WITHIN_S)
            # A hint needs no disk.
            await self._notifying.execute("set synchronous_commit = off")
        # Before the statement: the next NOTIFY covers messages that are published while this one runs.
        topics, whatever = self._topics, self._any
        self._topics, self._any = set(), False
        try:
            payload = payload_of(None if whatever else topics).decode()
            await self._notifying.execute(NOTIFY, CHANNEL, payload)
        except BaseException:
            self._topics |= topics
            self._any = self._any or whatever
            self._notifying.terminate()
            self._notifying = None
            raise
        await asyncio.sleep(NOTIFY_EVERY_S)
        return True

    async def listen(self) -> None:
        """Make sure that other processes' publications are heard. Raises what asyncpg does; the next call connects."""
        if self._listener is None:
            self._listener = await self._database.dedicated(answer_within_s=ANSWER_WITHIN_S)
        try:
            if not self._listening:
                await self._listener.add_listener(CHANNEL, self._heard)
                self._listening = True
                # Messages may have been published while no session listened.
                self.wake()
            # A connection that died silently is noticed here.
            await self._listener.execute("select 1")
        except BaseException:
            # What is known of the connection may be wrong.
            self._listener.terminate()
            self._listener, self._listening = None, False
            raise

    def _heard(self, _connection: object, pid: int, _channel: str, payload: object) -> None:
        # Our own relay was woken when it was published.
        if self._notifying is None or self._notifying.is_closed() or pid != self._notifying.get_server_pid():
            self._wake(topics_of(str(payload).encode()))

    async def close(self) -> None:
        """Close both connections."""
        for connection in (self._notifying, self._listener):
            if connection is not None:
                connection.terminate()
        self._notifying, self._listener, self._listening = None, None, False


def payload_of(topics: Collection[str] | None) -> bytes:
    """Return topics a line (they hold no control characters), or nothing if they are not known or too many."""
    lines = "\n".join(sorted(topics or ())).encode()
    return lines if len(lines) <= PAYLOAD_MAX_BYTES else b""


def topics_of(payload: bytes) -> list[str] | None:
    """Return the topics of a payload; None if any may be meant."""
    return payload.decode().split("\n") if payload else None
