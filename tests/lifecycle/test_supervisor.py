"""The parent of several processes: children whose event loop is blocked, starts that fail, errors of the parent."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from structlog.testing import capture_logs

from app.cli import supervisor as supervisor_module
from app.cli.supervisor import (
    ASK_SERVING_EVERY_S,
    FIRST_PAUSE_S,
    HANGS_AFTER_LOOKS,
    KILLED_ENDS_WITHIN_S,
    STEADY_AFTER_S,
    Child,
    Place,
    Supervisor,
)
from tests.lifecycle.test_worker_process import DeadChild
from tests.support.blocking_app import STOPS_WITH, waits

WITHIN_S = 60.0


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A bound socket for children. What they set in the environment goes after the test."""
    monkeypatch.setenv("HALFNOTE_ROLE", "all")
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def config() -> uvicorn.Config:
    return uvicorn.Config("tests.support.blocking_app:app", log_config=None, timeout_graceful_shutdown=1)


def url_of(listener: socket.socket) -> str:
    return "http://{}:{}".format(*listener.getsockname())


def pid_of(listener: socket.socket) -> int | None:
    """Return the id of the process that answers; None if the one that took the request was killed."""
    try:
        return int(httpx.get(url_of(listener), timeout=WITHIN_S).text)
    except httpx.TransportError:
        return None


@pytest.fixture
def child(listener: socket.socket) -> Iterator[Child]:
    """A child that serves the app of tests.support.blocking_app."""
    made = Child(config(), [listener], "api", 0)
    now = made.looked_at
    while not made.serves:
        now += 1
        made.ask(now)
        assert made.parent_conn.poll(WITHIN_S)
        made.hear()
    yield made
    made.process.kill()
    made.process.join()


def until(reached: Callable[[], object]) -> None:
    """Wait until the call returns something true."""
    ends_at = time.monotonic() + WITHIN_S
    while not reached():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def look_until_it_hangs(child: Child) -> None:
    """Ask the child, and take as many looks as a child that hangs is given."""
    assert child.unanswered is None
    now = child.looked_at
    for _ in range(HANGS_AFTER_LOOKS + 1):
        now += ASK_SERVING_EVERY_S
        child.ask(now)


def test_a_child_whose_event_loop_is_blocked_does_not_answer(
    child: Child, listener: socket.socket, tmp_path: Path
) -> None:
    file = tmp_path / "go"
    with ThreadPoolExecutor() as pool:
        blocked = pool.submit(httpx.post, f"{url_of(listener)}/block?{file}", timeout=WITHIN_S)
        until(waits(file).exists)
        look_until_it_hangs(child)
        # A thread of the child would answer at once.
        assert not child.parent_conn.poll(1)
        assert child.hangs
        file.touch()
        assert blocked.result().text == str(child.pid)
    assert child.parent_conn.poll(WITHIN_S)
    child.hear()
    assert not child.hangs
    assert child.serves


def test_a_child_that_stops_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "go"
    monkeypatch.setenv(STOPS_WITH, str(file))
    child: Child = request.getfixturevalue("child")
    child.signal(signal.SIGTERM)
    until(waits(file).exists)
    look_until_it_hangs(child)
    assert child.parent_conn.poll(WITHIN_S)
    child.hear()
    assert not child.hangs
    file.touch()
    child.process.join(WITHIN_S)
    assert child.exitcode == 0


@pytest.mark.parametrize("fault", ["blocked", "stopped"])
def test_a_child_that_hangs_is_replaced(listener: socket.socket, tmp_path: Path, fault: str) -> None:
    """The first child's event loop is blocked, or the child alone is stopped, until the parent ends it."""
    supervisor = Supervisor(config(), listener, ["api"], tmp_path / "worker.json", api_niceness=0)

    def break_first() -> None:
        try:
            until(ready.is_set)
            first = pid_of(listener)
            assert first is not None
            if fault == "stopped":
                psutil.Process(first).suspend()
            else:
                with pytest.raises(httpx.TransportError):
                    httpx.post(f"{url_of(listener)}/block?{tmp_path / 'never'}", timeout=WITHIN_S)
            until(lambda: pid_of(listener) not in (None, first))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    ready = threading.Event()
    with ThreadPoolExecutor() as pool:
        broken = pool.submit(break_first)
        assert supervisor.run(ready.set) == "stopped"
    broken.result()


def test_a_start_that_fails_is_tried_again(listener: socket.socket) -> None:
    place = Place("api", lambda role: Child(config(), [listener], role, 0), None)
    with no_more_files():
        assert place.turn(0.0)
        assert place.child is None
        # Not at once.
        assert place.turn(FIRST_PAUSE_S / 2)
        assert place.turn(FIRST_PAUSE_S)
        assert place.child is None
    assert place.turn(2 * FIRST_PAUSE_S)
    assert place.child is None
    assert place.turn(3 * FIRST_PAUSE_S)
    assert place.runs
    assert place.child is not None
    place.child.process.kill()
    place.child.process.join()


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let this process open no more files until the block ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        os.close(lowest)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_error_of_the_parent_stops_its_children(listener: socket.socket, tmp_path: Path) -> None:
    supervisor = Supervisor(config(), listener, ["api", "api"], tmp_path / "worker.json", api_niceness=0)
    served: list[psutil.Process] = []

    def fail() -> None:
        served.extend(one for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline()))
        raise RuntimeError("a fault of the parent")

    with pytest.raises(RuntimeError, match="a fault of the parent"):
        supervisor.run(fail)
    assert len(served) == 2
    assert not any(one.is_running() for one in served)


def test_a_worker_is_replaced_although_its_state_cannot_be_removed(tmp_path: Path) -> None:
    """A program that cleans the directory for temporary files may remove that of the state, too."""
    starts: list[str] = []

    def start(role: str) -> Any:
        starts.append(role)
        return DeadChild(0.0)

    place = Place("worker", start, tmp_path / "gone" / "worker.json")
    for now in (0.0, STEADY_AFTER_S, STEADY_AFTER_S, STEADY_AFTER_S):
        assert place.turn(now)
    assert starts == ["worker", "worker"]


def test_a_child_that_does_not_end_is_killed_once() -> None:
    acts: list[str] = []
    place = Place("api", lambda role: DeadChild(0.0), None)  # type: ignore[arg-type,return-value]
    place.child = SimpleNamespace(  # type: ignore[assignment]
        pid=1, signal=lambda number: acts.append("told"), process=SimpleNamespace(kill=lambda: acts.append("killed"))
    )
    for now in (0.0, 5.0, 11.0, 11.1, 30.0):
        place.tell(now, within_s=10.0)
    assert acts == ["told", "killed"]


def test_a_killed_child_that_does_not_end_delays_nothing(tmp_path: Path) -> None:
    """A process that waits for a disk takes no signal, not even SIGKILL."""
    acts: list[str] = []

    def start(role: str) -> Any:
        acts.append("started")
        return DeadChild(0.0)

    place = Place("api", start, None)
    pipe = SimpleNamespace(close=lambda: None)
    process = SimpleNamespace(kill=lambda: acts.append("killed"), join=lambda: acts.append("waited"))
    hanging = SimpleNamespace(
        pid=1,
        hangs=True,
        exitcode=None,
        started_at=0.0,
        process=process,
        parent_conn=pipe,
        child_conn=pipe,
        ask=lambda now: None,
    )
    place.child, place.served = hanging, True  # type: ignore[assignment]
    for now in (STEADY_AFTER_S, STEADY_AFTER_S + 1):
        assert place.turn(now)
    assert acts == ["killed"]
    hanging.exitcode = -signal.SIGKILL
    for now in (STEADY_AFTER_S + 2, STEADY_AFTER_S + 2):
        assert place.turn(now)
    assert acts == ["killed", "started"]


def test_a_killed_child_that_does_not_end_is_given_up() -> None:
    acts: list[str] = []
    place = Place("api", lambda role: DeadChild(0.0), None)  # type: ignore[arg-type,return-value]
    place.child = SimpleNamespace(  # type: ignore[assignment]
        pid=7, signal=lambda number: acts.append("told"), process=SimpleNamespace(kill=lambda: acts.append("killed"))
    )
    with capture_logs() as logs:
        for now in (0.0, 10.1, 10.0 + KILLED_ENDS_WITHIN_S):
            place.tell(now, within_s=10.0)
            assert not place.given_up
        for _ in range(2):
            place.tell(10.1 + KILLED_ENDS_WITHIN_S, within_s=10.0)
            assert place.given_up
    assert acts == ["told", "killed"]
    assert [(one["event"], one["pid"]) for one in logs] == [("process_killed", 7), ("process_not_ended", 7)]


def test_a_stop_ends_although_a_killed_child_does_not(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "BEYOND_DRAIN_S", 0.1)
    monkeypatch.setattr(supervisor_module, "KILLED_ENDS_WITHIN_S", 0.1)
    supervisor = Supervisor(config(), listener, ["api"], tmp_path / "worker.json", api_niceness=0)
    stuck = NeverEnding()
    [place] = supervisor._places
    place.child, place.served = stuck, True  # type: ignore[assignment]
    with ThreadPoolExecutor() as pool:

        def stop() -> None:
            until(lambda: "asked" in stuck.acts)
            os.kill(os.getpid(), signal.SIGTERM)

        stopping = pool.submit(stop)
        assert supervisor.run(lambda: None) == "not ended"
    stopping.result()
    assert [act for act in stuck.acts if act != "asked"] == ["told", "killed"]


class NeverEnding(DeadChild):
    """A child that takes no signal, as one that waits for a disk."""

    looks_every_s = 0.1

    def __init__(self) -> None:
        super().__init__(0.0)
        self.acts: list[str] = []
        self.parent_conn, self.child_conn = Pipe()  # type: ignore[assignment]
        self.process = SimpleNamespace(  # type: ignore[assignment]
            kill=lambda: self.acts.append("killed"), sentinel=self.child_conn.fileno()
        )

    def ask(self, now: float) -> None:
        """Do not answer."""
        self.acts.append("asked")

    def signal(self, number: int) -> None:
        """Do not end."""
        self.acts.append("told")


GOES_ON = """
import sys, time
from multiprocessing import get_context
from app.cli.server_process import exit_without_children

child = get_context("spawn").Process(target=time.sleep, args=(600,))
child.start()
sys.stdout.write(f"{child.pid} ")
try:
    exit_without_children()
finally:
    sys.stdout.write("ended in order")
"""


def test_the_exit_does_not_wait_for_a_child_that_goes_on() -> None:
    """Python waits at the exit for each child process that it has started."""
    command = [sys.executable, "-c", GOES_ON]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert program.wait(WITHIN_S) == 1
        assert program.stdout is not None
        # The child has the pipe, too, so it has no end yet.
        pid, _, rest = os.read(program.stdout.fileno(), 1000).decode().partition(" ")
        assert rest == "ended in order"
        assert psutil.pid_exists(int(pid))
    finally:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
