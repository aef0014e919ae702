"""Run `halfnote serve` as several child processes: start them, restart those that end or hang, stop them in order."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, parent_process, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Literal

import structlog
import uvicorn
from uvicorn.supervisors.multiprocess import Process

from app.config import ProcessRole
from app.runtime import worker_state

log = structlog.get_logger(__name__)

# How often a child is asked for an answer: until it serves, and later.
ASK_EVERY_S, ASK_SERVING_EVERY_S = 0.1, 5.0
# One that has not answered after so many looks hangs. Looks are counted, not seconds: Ctrl-Z stops the parent as well.
LOOK_EVERY_S, HANGS_AFTER_LOOKS = 1.0, 15
# A child that dies again within this time waits before its next start, twice as long each time.
STEADY_AFTER_S = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
# The worker beside API processes gets SIGTERM this long after them, or when they have ended, so that it delivers
# their last messages.
WORKER_STOPS_AFTER_S = 1.0
# How long a child may take beyond its drain, for its start and its end.
BEYOND_DRAIN_S = 10.0
# How long a killed child may take to end. One that waits for a disk takes no signal, not even SIGKILL.
KILLED_ENDS_WITHIN_S = 10.0
# A canceled future takes three turns of the event loop to its answer: its callback, a task, the write.
CANCEL_TURNS = 10
STOPPING = (signal.SIGTERM, signal.SIGINT)
# A terminal sends them to all processes. The parent's signal is enough for its children.
OF_TERMINAL = (signal.SIGINT, signal.SIGHUP) if os.name == "posix" else (signal.SIGINT,)

End = Literal["stopped", "interrupted", "not started", "not ended"]


class Server(uvicorn.Server):
    """Uvicorn's server. It tells its event loop to other threads, and logs no error on a second Ctrl-C."""

    event_loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        self.event_loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; after a second Ctrl-C cancel open requests, and do not log that as an error."""
        await super().shutdown(sockets)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True
            # The end of the event loop cancels tasks alone, and a request of the fast path may be a future.
            for request in list(self.server_state.tasks):
                request.cancel()
            # Each is answered in one of the next turns of the event loop.
            for _ in range(CANCEL_TURNS):
                await asyncio.sleep(0)


class Child(Process):
    """A process that serves in one role and ends when its parent is gone, however the parent ended."""

    _server: Server | None

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], role: ProcessRole, niceness: int) -> None:
        super().__init__(config, sockets)
        self.niceness = niceness
        self.started_at = self.looked_at = monotonic()
        # Looks since it was asked, None if it answered.
        self.unanswered: int | None = None
        self.serves = False
        # A spawned process has the environment and the blocked signals of the moment of its start.
        os.environ["HALFNOTE_ROLE"] = role
        # It would unblock the signals.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, OF_TERMINAL)
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_TERMINAL)

    @property
    def server(self) -> Server:
        """The server that runs in the child."""
        assert self._server is not None
        return self._server

    def pong(self) -> None:
        """Take a question of the parent, in a thread of the child, and let the event loop answer it.

        So a child whose event loop is blocked does not answer.
        """
        self.child_conn.recv()
        loop = self.server.event_loop
        if loop is None:
            self._answer()
            return
        # An event loop that has ended answers no more: a child that does not end then hangs, too.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self.child_conn.send(self.server.started)

    def target(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, in the child."""
        # Before the thread that answers starts: it and this thread could make one each.
        self._server = Server(config=self.config)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        if self.niceness:
            os.nice(self.niceness)
        # Uvicorn's handlers raise its signals again in the end. This lets it answer requests that it cuts off.
        signal.signal(signal.SIGTERM, _leave)
        # The server handles SIGINT later, for a second Ctrl-C.
        for number in OF_TERMINAL:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_TERMINAL)
        super().target(sockets)

    def ask(self, now: float) -> None:
        """Ask for an answer if one is due, or count another look without an answer."""
        if now - self.looked_at < self.looks_every_s:
            return
        self.looked_at = now
        if self.unanswered is None:
            self.unanswered = 0
            self._talk(lambda: self.parent_conn.send(b"ping"))
        else:
            self.unanswered += 1

    def hear(self) -> None:
        """Take the answer: whether it serves."""
        self.unanswered = None
        self._talk(lambda: setattr(self, "serves", self.parent_conn.recv()))

    @property
    def looks_every_s(self) -> float:
        """How long until the next look."""
        if not self.serves:
            return ASK_EVERY_S
        return ASK_SERVING_EVERY_S if self.unanswered is None else LOOK_EVERY_S

    @property
    def hangs(self) -> bool:
        """Whether it does not answer; a process that starts may take its time."""
        return self.serves and self.unanswered is not None and self.unanswered >= HANGS_AFTER_LOOKS

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self.exitcode is None and self.pid is not None:
            os.kill(self.pid, number)

    @staticmethod
    def _talk(call: Callable[[], object]) -> None:
        try:
            call()
        except (OSError, EOFError):
            # It died. Its sentinel says so.
            return


class Place:
    """One of the processes that there should be: the child that has its place now, or when the next one starts."""

    def __init__(self, role: ProcessRole, start: Callable[[ProcessRole], Child], state_file: Path | None) -> None:
        self.role = role
        self._start, self._state_file = start, state_file
        self._pause_s = 0.0
        self._starts_at = 0.0
        self.child: Child | None = None
        self.served = False
        self.told_at: float | None = None
        self._interrupted = self._killed = False
        # Its child did not end although it was killed, and is not waited for any more.
        self.given_up = False

    def turn(self, now: float) -> bool:
        """Start, ask or replace the child; return False if the service cannot start."""
        if self.child is None:
            if now >= self._starts_at:
                self._begin(now)
            return True
        if self.child.exitcode is None and self.child.hangs:
            self._kill(self.child)
            return True
        if self.child.exitcode is None:
            self.child.ask(now)
            self.served = self.served or self.child.serves
            return True
        return self._died(self.child, now)

    def _kill(self, child: Child) -> None:
        """Kill a child that hangs. A later turn replaces it: one that waits for a disk ends later, or never."""
        if not self._killed:
            self._killed = True
            log.error("process_hangs", role=self.role, pid=child.pid)
            child.process.kill()

    def _begin(self, now: float) -> None:
        try:
            self.child = self._start(self.role)
        except OSError as error:
            # The machine lacks processes, memory or open files. Others may end soon.
            self._rest(now, steady=False)
            log.error("process_not_started", role=self.role, because=str(error), restart_s=self._pause_s)
        else:
            self._killed = False
            log.info("process_started", role=self.role, pid=self.child.pid)

    def _died(self, child: Child, now: float) -> bool:
        code = child.exitcode
        assert code is not None
        child.parent_conn.close()
        child.child_conn.close()
        self.child = None
        if self._state_file is not None:
            # Readers take a state that stays for a silent worker's, a little later.
            with suppress(OSError):
                worker_state.clear(self._state_file)
        if not self.served and code > 0:
            return False
        self._rest(now, steady=now - child.started_at >= STEADY_AFTER_S)
        log.error("process_died", role=self.role, pid=child.pid, status=code, restart_s=self._pause_s)
        return True

    def _rest(self, now: float, *, steady: bool) -> None:
        """Wait before the next start, longer after each failure."""
        self._pause_s = 0.0 if steady else min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._starts_at = now + self._pause_s

    @property
    def runs(self) -> bool:
        """Whether a process has this place now."""
        return self.child is not None and self.child.exitcode is None

    def tell(self, now: float, within_s: float) -> None:
        """Tell the child to stop; kill it if it did not within this time, and give it up if that does not end it."""
        if self.child is None:
            return
        if self.told_at is None:
            self.told_at = now
            self.child.signal(signal.SIGTERM)
        elif now - self.told_at > within_s and not self._killed:
            self._killed = True
            log.error("process_killed", role=self.role, pid=self.child.pid, because="it did not end")
            self.child.process.kill()
        elif now - self.told_at > within_s + KILLED_ENDS_WITHIN_S and not self.given_up:
            self.given_up = True
            log.error(
                "process_not_ended",
                role=self.role,
                pid=self.child.pid,
                because="it did not end after SIGKILL, and is not waited for",
            )

    def interrupt(self, now: float, within_s: float) -> None:
        """End the child at once: a second signal after the one that tells it to stop drops its work in flight."""
        if self.told_at is not None and self.child is not None and not self._interrupted:
            self._interrupted = True
            self.child.signal(signal.SIGINT)
        self.tell(now, within_s)


class Supervisor:
    """The parent of several processes. Processes in role `worker` beside others do not listen."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        roles: Sequence[ProcessRole],
        state_file: Path,
        api_niceness: int,
    ) -> None:
        self._config = config
        self._listener = listener
        mixed = "worker" in roles and "api" in roles
        if mixed:
            os.environ[worker_state.VARIABLE] = str(state_file)
            worker_state.clear(state_file)

        def start(role: ProcessRole) -> Child:
            beside = mixed and role == "worker"
            return Child(config, [] if beside else [listener], role, api_niceness if mixed and role == "api" else 0)

        self._places = [Place(role, start, state_file if mixed and role == "worker" else None) for role in roles]
        self._signals = 0
        self._interrupts = 0
        self._woken, self._waker = Pipe(duplex=False)

    def run(self, ready: Callable[[], None]) -> End:
        """Run the processes until a signal ends them; call `ready` once all of them serve. Raises what it raises.

        "not ended": a process goes on although it was killed.
        """
        with self._handling_signals():
            try:
                started = self._supervise(ready)
            finally:
                # After an error, too: without a parent nothing restarts the processes or stops them in order.
                self._stop()
        if any(place.given_up for place in self._places):
            return "not ended"
        if not started:
            return "not started"
        return "interrupted" if self._interrupts > 1 else "stopped"

    def _supervise(self, ready: Callable[[], None]) -> bool:
        """Start and replace processes until a signal comes; return False if the service cannot start."""
        told = False
        while not self._signals:
            now = monotonic()
            if not all(place.turn(now) for place in self._places):
                return False
            if not told and all(place.served for place in self._places):
                told = True
                ready()
            self._wait()
        return True

    def _stop(self) -> None:
        """Stop the processes that listen, then the worker beside them.

        One that goes on although it was killed is not waited for any more, so that a stop always ends.
        """
        # The socket listens while any process has it open: a connection that no process accepts would wait.
        self._listener.close()
        within_s = float(self._config.timeout_graceful_shutdown or 0) + BEYOND_DRAIN_S
        began = monotonic()
        while running := [place for place in self._places if place.runs and not place.given_up]:
            now = monotonic()
            # If all have the role `worker`, each of them listens.
            listening = [place for place in running if place.role != "worker"]
            for place in running:
                if self._interrupts > 1:
                    place.interrupt(now, within_s)
                elif not listening or place in listening or now - began >= WORKER_STOPS_AFTER_S:
                    place.tell(now, within_s)
            self._wait(0.1)

    def _wait(self, at_most_s: float = ASK_SERVING_EVERY_S) -> None:
        """Wait until a child ends or answers, or a signal comes; no longer than until a child is to be asked."""
        children = [place.child for place in self._places if place.runs and place.child is not None]
        waits_s = [at_most_s, *(child.looks_every_s for child in children)]
        if len(children) < len(self._places):
            waits_s.append(ASK_EVERY_S)
        answers = {child.parent_conn: child for child in children}
        for came in wait([self._woken, *answers, *(child.process.sentinel for child in children)], min(waits_s)):
            if came is self._woken:
                self._woken.recv_bytes()
            elif came in answers:
                answers[came].hear()

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._heard) for number in STOPPING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        self._interrupts += number == signal.SIGINT
        self._waker.send_bytes(b"signal")


def _end_with_parent() -> None:
    """Wait until the parent has ended, then stop this process as SIGTERM does."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
