"""Connections of remoting clients: frames in, answers out, and an end for clients that send or read too slowly."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from itertools import count

import structlog

from app.rocketmq.buffers import BufferedBytes, Buffers
from app.rocketmq.gateway_metrics import GatewayMetrics
from app.rocketmq.listening import local_address
from app.rocketmq.remoting.codes import RequestCode, ResultCode
from app.rocketmq.remoting.frames import FrameFault, RemotingFrame, decode, encode
from app.rocketmq.remoting.remoting_clients import RemotingClient
from app.rocketmq.remoting.store_format import Host
from app.rocketmq.request_limits import RequestLimits

log = structlog.get_logger(__name__)

# A client sends a heartbeat every 30 s, RocketMQ's servers end a connection after 120 s without a word.
IDLE_S = 120.0
# Room for a body above the limit, which then gets an answer, and for a batch and its properties.
FRAME_ROOM_BYTES = 2 * 1024 * 1024
# A frame is read in parts of this size. A part waits in the process for its room, those after it at the client.
PART_BYTES = 16 * 1024
# Requests of a connection that are not answered yet; more are read when one is answered. Pulls wait for messages, so
# they have a limit of their own.
REQUESTS_MAX = 256
# Pulls of a connection, in multiples of the topics that its client may name: one for each of four queues, and one for
# the topic of a group's retries.
PULLS_PER_TOPIC = 5
# Characters of a pull's fields, names and remark. The gateway keeps them while the pull waits.
PULL_MAX_CHARACTERS = 16 * 1024
# Bytes that wait for a client which does not read.
UNREAD_MAX_BYTES = 32 * 1024 * 1024
_numbers = count(1)

# A client takes a part of what was written within this time. RocketMQ's consumers drop an answer to a pull after 30 s.
UNREAD_S = 60.0
LOOK_S = 1.0

Answer = Callable[[RemotingFrame, "RemotingConnection", BufferedBytes], Awaitable[RemotingFrame]]


class RemotingConnection:
    """One connection. `client` is known from its heartbeat on, `heartbeat_refused` is why the last one was refused."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        limits: RequestLimits,
        metrics: GatewayMetrics,
        buffers: Buffers,
    ) -> None:
        self._reader, self._writer, self._metrics, self._buffers = reader, writer, metrics, buffers
        self._frame_limit, self._arrives_s = limits.body_bytes + FRAME_ROOM_BYTES, limits.arrives_s
        self._drain_s = limits.drain_s
        self._pulls_max = PULLS_PER_TOPIC * limits.topics
        self.client: RemotingClient | None = None
        self.heartbeat_refused: str | None = None
        self._number = next(_numbers)
        named = writer.get_extra_info("sockname") or ("", 0)
        self._host: Host = (local_address(str(named[0])), int(named[1]))
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulls: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(REQUESTS_MAX)
        self._reading: asyncio.Task[None] | None = None
        self._written = 0

    @property
    def number(self) -> int:
        """The number of the connection, which no other one of this process has."""
        return self._number

    @property
    def host(self) -> Host:
        """The address of this server on the connection."""
        return self._host

    @property
    def takes_answers(self) -> bool:
        """Whether the client is there, and reads."""
        return not self._writer.is_closing() and not self._is_unread

    @property
    def _is_unread(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > UNREAD_MAX_BYTES

    def send(self, frame: RemotingFrame) -> bool:
        """Send a frame; return False if the client is gone or does not read."""
        if self._writer.is_closing():
            return False
        if self._is_unread:
            self._end_unread()
            return False
        content = encode(frame)
        self._writer.write(content)
        self._written += len(content)
        return True

    def abort(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def serve(self, answer: Answer) -> None:
        """Answer requests until the connection ends, or is to end."""
        self._reading = asyncio.create_task(self._read_requests(answer))
        try:
            await asyncio.wait([self._reading])
            if self._reading.cancelled():
                await self._answer_rest()
            else:
                self._reading.result()
        finally:
            self._reading.cancel()
            self.abort()
            # An end or an offset that the client sent before it left counts. Only what waits for messages is over.
            self._end_pulls()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def end(self) -> None:
        """Read no more requests. End the connection when those that were read are answered, or after the drain."""
        if self._reading is not None:
            self._reading.cancel()
        # Also of a client that left before: what it sent is still answered.
        asyncio.get_running_loop().call_later(self._drain_s, self._cancel_rest)

    async def _read_requests(self, answer: Answer) -> None:
        # A client that connects has something to say.
        within_s = self._arrives_s
        try:
            while True:
                buffered = self._buffers.part()
                frame = await self._read(within_s, buffered)
                within_s = IDLE_S
                if frame.is_answer:
                    buffered.release()
                elif frame.code == RequestCode.PULL_MESSAGE:
                    # Pulls that wait have a limit of their own.
                    buffered.release()
                    self._begin_pull(frame, answer, buffered)
                else:
                    await self._free.acquire()
                    self._begin(frame, answer, buffered).add_done_callback(lambda _: self._free.release())
        except (asyncio.IncompleteReadError, ConnectionError):
            # The client left.
            pass
        except TimeoutError:
            self._metrics.connection_refused("slow")
        except FrameFault as fault:
            self._metrics.connection_refused("frame")
            log.info("rocketmq_frame_refused", error=str(fault), client=self._name())

    async def _answer_rest(self) -> None:
        self._end_pulls()
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._drain_s):
                if self._tasks:
                    await asyncio.wait(self._tasks)
                # What is written goes out first.
                self._writer.close()
                await self._writer.wait_closed()
        self._cancel_rest()

    def _cancel_rest(self) -> None:
        # As gRPC does: what still waits for the service would keep the process after its drain.
        for task in self._tasks:
            task.cancel()

    def _end_pulls(self) -> None:
        for pull in self._pulls:
            pull.cancel()

    async def _read(self, within_s: float, buffered: BufferedBytes) -> RemotingFrame:
        async with asyncio.timeout(within_s):
            length = int.from_bytes(await self._reader.readexactly(4), "big")
        if not 4 <= length <= self._frame_limit:
            raise FrameFault(f"a frame of {length} bytes; {self._frame_limit} are the most")
        try:
            return decode(await self._read_parts(length, buffered))
        except BaseException:
            buffered.release()
            raise

    async def _read_parts(self, length: int, buffered: BufferedBytes) -> bytes:
        """Read a frame whose length the client announced. Only what has arrived of it is held."""
        content, left_s = bytearray(), self._arrives_s
        while len(content) < length:
            begun = time.monotonic()
            async with asyncio.timeout(left_s):
                part = await self._reader.read(min(PART_BYTES, length - len(content)))
            left_s -= time.monotonic() - begun
            if not part:
                raise asyncio.IncompleteReadError(bytes(content), length)
            # The client sends no more meanwhile: what is not read stays in its own system.
            await buffered.arrived(len(part), length)
            content += part
        return bytes(content)

    def _begin(self, frame: RemotingFrame, answer: Answer, buffered: BufferedBytes) -> asyncio.Task[None]:
        task = asyncio.create_task(self._answer(frame, answer, buffered))
        # Also one that is canceled before it begins.
        task.add_done_callback(lambda _: buffered.release())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin_pull(self, frame: RemotingFrame, answer: Answer, buffered: BufferedBytes) -> None:
        if frame.body or _characters(frame) > PULL_MAX_CHARACTERS:
            text = f"A pull has no body, and at most {PULL_MAX_CHARACTERS:,} characters in its fields."
            self._refuse_pull(frame, ResultCode.SYSTEM_ERROR, text)
        elif frame.wants_no_answer:
            # It would claim messages that the client never gets.
            self._refuse_pull(frame, ResultCode.SYSTEM_ERROR, "A pull takes an answer.")
        elif len(self._pulls) >= self._pulls_max:
            # A client pulls again at once after "not found", and after three seconds when the server is busy.
            text = (
                f"{self._pulls_max:,} pulls of this connection wait already, the most (--max-topics). "
                "Use several clients."
            )
            self._refuse_pull(frame, ResultCode.SYSTEM_BUSY, text)
        else:
            task = self._begin(frame, answer, buffered)
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)

    def _refuse_pull(self, frame: RemotingFrame, code: ResultCode, text: str) -> None:
        self._metrics.answered("remoting", RequestCode.PULL_MESSAGE.name, code.name, None)
        if not frame.wants_no_answer:
            self.send(frame.answered(code, text))

    async def _answer(self, frame: RemotingFrame, answer: Answer, buffered: BufferedBytes) -> None:
        answered = await answer(frame, self, buffered)
        if frame.wants_no_answer or not self.send(answered):
            return
        if frame.code != RequestCode.PULL_MESSAGE:
            buffered.release()
        await self.all_taken()

    async def all_taken(self) -> None:
        """Wait until the client has taken what was written so far. End one that takes nothing for UNREAD_S."""
        end, taken, since = self._written, -1, time.monotonic()
        while True:
            try:
                # It ends only when nearly nothing waits, also of later answers.
                async with asyncio.timeout(min(LOOK_S, UNREAD_S)):
                    await self._writer.drain()
                return
            except TimeoutError:
                before, taken = taken, self._written - self._writer.transport.get_write_buffer_size()
                if taken >= end:
                    return
                if taken > before:
                    since = time.monotonic()
                elif time.monotonic() - since >= UNREAD_S:
                    self._end_unread()
                    return
            except ConnectionError:
                return

    def _end_unread(self) -> None:
        log.warning("rocketmq_client_does_not_read", client=self._name())
        self._metrics.connection_refused("unread")
        self.abort()

    def _name(self) -> str:
        return self.client.client_id if self.client is not None else "unknown"


def _characters(frame: RemotingFrame) -> int:
    return len(frame.remark or "") + sum(len(name) + len(value) for name, value in frame.fields.items())
