"""Passes what API processes published to the worker process of the same `halfnote serve`, by datagrams.

The worker binds a Unix socket beside its state file, in a directory of this service's user alone. API processes send
the topics of what they published and, as far as they have them in memory, the messages. The worker notifies the relays
of other machines for them (`WakeUps.published`). A datagram is a hint, as a NOTIFY is: a relay that misses one reads
the log at its next poll. If no datagram can be sent, the API process sends NOTIFY itself.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
import structlog

from app.database.notifier import PAYLOAD_MAX_BYTES, WakeUps
from app.runtime.worker_state import worker_state_file
from app.store.relay.log import Logged

log = structlog.get_logger(__name__)

# Topics that are published within this time share a datagram. Flushes may follow each other sooner than the worker can
# read. Messages are sent at once, because a subscriber waits for them.
REST_S = 0.002
# The most datagrams that are read in one turn of the event loop.
READS_MAX = 32
# The largest datagram: Linux takes up to 200 kB by default. Messages that do not fit are read from the log.
DATAGRAM_MAX_BYTES = 128 * 1024

# The topics of what was published; None if they are not known.
Topics: TypeAlias = Collection[str] | None
# Topics, messages in the order of their offsets, and whether these are all that was published.
Received: TypeAlias = Callable[[Topics, Sequence[Logged], bool], None]
# Returns the highest timeline that this process has seen, None if it can read none.
Timeline: TypeAlias = Callable[[], int | None]

_encode = msgspec.msgpack.Encoder(uuid_format="bytes").encode
_decode = msgspec.msgpack.Decoder(tuple[list[str] | None, list[Logged], bool, int | None]).decode


def join_worker_beside(wake_ups: WakeUps, role: str, received: Received) -> "WakeUpSender | WakeUpReceiver | None":
    """Connect the API processes and the worker of one `halfnote serve`; None where no worker runs beside others.

    `received` is called in the worker. The caller closes what is returned.
    """
    state_file = worker_state_file()
    if state_file is None:
        return None
    path = state_file.with_name("wake-ups")
    if role == "worker":
        try:
            return WakeUpReceiver(path, received, wake_ups.timeline)
        except OSError as error:
            # Such as a path of over 107 bytes.
            log.warning("wake_up_socket_unavailable", path=str(path), because=str(error), effect="NOTIFY is used")
            return None
    wake_ups.worker = sender = WakeUpSender(path, wake_ups.notify_soon, wake_ups.timeline)
    return sender


class WakeUpSender:
    """Sends what this process published to the worker, or its topics to `otherwise` if that cannot be reached."""

    def __init__(self, path: Path, otherwise: Callable[[Topics], None], timeline: Timeline = lambda: None) -> None:
        self._path, self._otherwise, self._timeline = str(path), otherwise, timeline
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        # What waits for its datagram: topics without their messages.
        self._topics: set[str] = set()
        self._any = False
        self._sent_at = -REST_S
        self._timer: asyncio.TimerHandle | None = None

    def published(self, topics: Topics, messages: Sequence[Logged] = (), complete: bool = False) -> None:
        """Send messages now; send topics now, or together with others when REST_S has passed since the last datagram.

        `complete`: the messages are all that was published.
        """
        if messages:
            self._send(topics, messages, complete)
            return
        if topics is None:
            self._any = True
        else:
            self._topics.update(topics)
        if self._timer is None:
            rest_s = self._sent_at + REST_S - self._loop.time()
            if rest_s <= 0:
                self._send_topics()
            else:
                self._timer = self._loop.call_later(rest_s, self._send_topics)

    def begin_drain(self) -> None:
        """Go on sending: requests that are open may publish."""

    def close(self) -> None:
        """Send what waits, and close the socket."""
        if self._timer is not None:
            self._timer.cancel()
            self._send_topics()
        self._socket.close()

    def _send_topics(self) -> None:
        topics = None if self._any else self._topics
        self._topics, self._any, self._timer = set(), False, None
        self._sent_at = self._loop.time()
        self._send(topics, (), False)

    def _send(self, topics: Topics, messages: Sequence[Logged], complete: bool) -> None:
        named = None if topics is None or sum(map(len, topics)) > PAYLOAD_MAX_BYTES // 4 else sorted(topics)
        datagram = _encode((named, messages, complete, self._timeline()))
        if len(datagram) > DATAGRAM_MAX_BYTES:
            middle = len(messages) // 2
            if middle:
                self._send(topics, messages[:middle], True)
            self._send(topics, messages[middle:] if middle else (), complete and middle > 0)
            return
        try:
            self._socket.sendto(datagram, self._path)
        except OSError:
            # The worker has not started, has ended, or reads more slowly than processes send.
            self._otherwise(topics)


class WakeUpReceiver:
    """Receives what API processes published. Raises OSError if the socket cannot be bound.

    Messages of a process that has seen another timeline are left to the log: the same offsets may be of others here.
    """

    def __init__(self, path: Path, received: Received, timeline: Timeline = lambda: None) -> None:
        self._path, self._received, self._timeline = path, received, timeline
        # A worker that was killed leaves its socket.
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            self._socket.bind(str(path))
        except OSError:
            self._socket.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._readable)

    def begin_drain(self) -> None:
        """Receive nothing more, because the loops that would act on it end now."""
        self.close()

    def close(self) -> None:
        """Receive nothing more: senders use NOTIFY from now on. A second call does nothing."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _readable(self) -> None:
        # Linux queues as few as ten datagrams, so a turn of the event loop takes all of them.
        for _ in range(READS_MAX):
            try:
                datagram = self._socket.recv(DATAGRAM_MAX_BYTES)
            except OSError:
                return
            topics, messages, complete, timeline = _decode(datagram)
            if timeline == self._timeline():
                self._received(topics, messages, complete)
            else:
                self._received(topics, (), False)
