"""Starts and ends the demo's processes, and waits for their results."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

import httpx

START_S = 120.0
STOP_S = 15.0
LOOPBACK = "127.0.0.1"


class StepFailed(Exception):
    """A step of the demo did not have the expected result."""


def halfnote_url() -> str:
    """Return the service's URL: HALFNOTE_URL, or else the address of `make run`."""
    host, port = os.environ.get("HALFNOTE_HOST", "127.0.0.1"), os.environ.get("HALFNOTE_PORT", "8080")
    return os.environ.get("HALFNOTE_URL", f"http://{host}:{port}")


def own_host(url: str) -> str:
    """Return the address at which Halfnote reaches the demo's programs: this machine's IPv4 address on the route to it.

    It is loopback if Halfnote is on loopback or no route is known. An address works where the name of a container might
    not be resolved.
    """
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # connect() on a UDP socket sends nothing.
        probe.connect((parts.hostname or "", parts.port or 80))
        return str(probe.getsockname()[0])
    return LOOPBACK


def listening_host() -> str:
    """Return the address that a program of the demo listens on; the demo passes it in the environment."""
    return os.environ.get("DEMO_HOST", LOOPBACK)


def api_key() -> dict[str, str]:
    """Return the header with the API key, if HALFNOTE_API_KEY is set."""
    key = os.environ.get("HALFNOTE_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def answers(url: str) -> bool:
    """Return whether Halfnote, and not another program, answers at the URL."""
    try:
        answer = httpx.get(f"{url}/version", headers=api_key(), timeout=2)
        return answer.is_success and "version" in answer.json()
    except (httpx.HTTPError, ValueError):
        return False


@contextmanager
def orderly_end() -> Iterator[None]:
    """Interrupt the block at SIGTERM and at a closed terminal as at Ctrl-C, so that it ends what it has started.

    Raises SystemExit after the block's end: 130 for Ctrl-C, 143 for the others.
    """
    # Not SIG_IGN: processes that are started later would inherit it.
    status, ignore = 128 + signal.SIGINT, lambda number, frame: None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal status
        status = 128 + signal.SIGTERM
        for one in handled:
            # A second signal must not interrupt the orderly end.
            signal.signal(one, ignore)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        # asyncio's own cancels the main task. A shell starts background programs with SIGINT ignored.
        (on_ctrl_c if callable(on_ctrl_c) else signal.default_int_handler)(signal.SIGINT, frame)

    ending = [signal.SIGTERM, *([signal.SIGHUP] if os.name == "posix" else [])]
    # Below `nohup` a program outlives its terminal.
    handled = {one: signal.getsignal(one) for one in ending if signal.getsignal(one) is not signal.SIG_IGN}
    for one in handled:
        signal.signal(one, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(status)
    finally:
        for one, before in handled.items():
            signal.signal(one, before)


@contextmanager
def own_halfnote() -> Iterator[str]:
    """Run a service on a free port over a temporary database; yield its URL."""
    with tempfile.TemporaryDirectory(prefix="halfnote-demo-") as directory:
        # If the service runs as root, it runs Postgres as another user, which must reach the directory.
        Path(directory).chmod(0o755)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
        with open(Path(directory) / "log", "w+") as log:
            # One process starts fastest.
            command = [sys.executable, "-m", "app.cli", "serve", "--workers", "1", "--port", str(port)]
            service = subprocess.Popen(  # noqa: S603 - our own program
                [*command, "--data-dir", f"{directory}/halfnote"], env=environment, stdout=log, stderr=log
            )
            try:
                await_true(lambda: answers(url) or service.poll() is not None, "the service starts", within_s=START_S)
                if service.returncode is not None:
                    raise StepFailed(f"the service did not start:\n{(Path(directory) / 'log').read_text()}")
                yield url
            finally:
                stop(service)


@contextmanager
def running(module: str, secret: str, host: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the demo's programs on an address until the end of the block, or until it dies."""
    environment = os.environ | {"DEMO_SECRET": secret, "DEMO_HOST": host}
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment)  # noqa: S603 - our own
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process if it still runs: SIGTERM, then SIGKILL if it does not react."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def await_listening(host: str, port: int) -> None:
    """Wait until something listens on the port of an address."""

    def listening() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, port)) == 0

    # Not DEMO_WAIT_S: a slow start does not mean that the program's steps are slow.
    await_true(listening, f"a process listens on {host}:{port}", within_s=START_S)


def await_true(happened: Callable[[], bool], what: str, *, within_s: float | None = None) -> None:
    """Wait until a condition holds. Raises StepFailed after DEMO_WAIT_S, by default 30 s."""
    within_s = within_s or float(os.environ.get("DEMO_WAIT_S", "30"))
    deadline = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > deadline:
            raise StepFailed(f"waited {within_s:g} s without success until {what}")
        time.sleep(0.02)


def free_port(host: str = LOOPBACK) -> int:
    """Return a port of an address of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def new_secret() -> str:
    """Return a new webhook secret."""
    return "whsec_" + b64encode(secrets.token_bytes(32)).decode()
