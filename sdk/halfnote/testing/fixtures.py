"""A pytest fixture that starts the real service with its embedded Postgres.

In conftest.py: `from halfnote.testing.fixtures import halfnote_command, halfnote_service`. Needs `halfnote-server`.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

__all__ = ["halfnote_command", "halfnote_service"]

START_WITHIN_S = 180.0
STOP_WITHIN_S = 60.0


@pytest.fixture(scope="session")
def halfnote_command() -> list[str]:
    """The service's command: `halfnote` beside this Python, else on the PATH. Override it to run another command."""
    beside = Path(sys.executable).parent / "halfnote"
    found = str(beside) if beside.exists() else shutil.which("halfnote")
    if found is None:
        pytest.fail("the command `halfnote` is missing: pip install halfnote-server")
    return [found]


@pytest.fixture(scope="session")
def halfnote_service(halfnote_command: Sequence[str]) -> Iterator[str]:
    """The URL of a service with a temporary database; one service for all tests of a process."""
    with tempfile.TemporaryDirectory(prefix="halfnote-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        # If the service runs as root, it runs Postgres as another user, which must reach the directory.
        directory.chmod(0o755)
        port = _free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
        # One process starts fastest.
        command = [*halfnote_command, "serve", "--workers", "1", "--port", str(port)]
        command += ["--data-dir", str(directory / "halfnote")]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - the developer's own
            try:
                _until_ready(f"http://127.0.0.1:{port}", process, directory / "log")
                yield f"http://127.0.0.1:{port}"
            finally:
                _stop(process)


def _until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the service is ready. Raises RuntimeError with its log if it ended or took too long."""
    deadline = time.monotonic() + START_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"halfnote did not start: {log.read_text(errors='replace')[-3000:]}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
