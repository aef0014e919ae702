"""The parent of several processes: children whose event loop is blocked, starts that fail, errors of the parent."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
import uvicorn

from app.cli.supervisor import ASK_SERVING_EVERY_S, HANGS_AFTER_LOOKS, Child, Supervisor
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
