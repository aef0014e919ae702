"""Start, watch and stop the programs that a benchmark measures, each in its own process."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.secrets.key_file import make_key_file

START_S = 60.0
STOP_S = 15.0
STARTED = "Application startup complete."
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Service:
    """A running service: its address and its processes."""

    port: int
    root: psutil.Process

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        """Return the processes that serve: the only process, or the children of the process that started them."""
        children = [child for child in self.root.children() if "spawn_main" in " ".join(child.cmdline())]
        return children or [self.root]

    def cpu_s(self) -> float:
        """Return the CPU time of the serving processes so far, user and system."""
        return sum(cpu_s(process) for process in self.processes())

    def resident_mb(self) -> float:
        """Return the resident memory of the largest serving process."""
        return max(process.memory_info().rss for process in self.processes()) / 2**20


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of one process, user and system, in seconds."""
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def serving(app: str, place: Path, env: Mapping[str, str], *, workers: int = 1) -> AsyncIterator[Service]:
    """Serve an ASGI app with uvicorn, with the same flags for every row; yield after each worker has started.

    Raises RuntimeError with the end of the log if the app does not start.
    """
    port = free_port()
    log = place / f"{app.replace(':', '.')}-{port}.log"
    command = [sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", str(port), "--no-access-log"]
    # The flags of `halfnote serve`.
    command += ["--no-proxy-headers", "--no-server-header", "--http", "app.server.http_protocol:HttpProtocol"]
    command += ["--timeout-keep-alive", "75"]
    if workers > 1:
        command += ["--workers", str(workers)]
    keys = place / "secrets.keys"
    make_key_file(keys)
    with log.open("wb") as file:
        # In a separate session, so that Ctrl-C reaches only this program, which then stops the service in order.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_clean() | {"HALFNOTE_SECRETS_KEY_FILE": str(keys)} | dict(env),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        await _started(process, log, workers)
        await _listening(port)
        yield Service(port, psutil.Process(process.pid))
    finally:
        stop(process)


@asynccontextmanager
async def receiving() -> AsyncIterator[Service]:
    """Run the fast receiver of webhooks and checks."""
    async with printing_port(sys.executable, "-m", "bench.receiver") as service:
        yield service


@asynccontextmanager
async def printing_port(*command: str) -> AsyncIterator[Service]:
    """Run a program that prints the port on which it listens, until the block ends."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        port = int(await asyncio.to_thread(process.stdout.readline))
        yield Service(port, psutil.Process(process.pid))
    finally:
        stop(process)
        if process.stdout is not None:
            process.stdout.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a program and its children with SIGTERM, then with SIGKILL if it does not react."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


async def _started(process: subprocess.Popen[bytes], log: Path, workers: int) -> None:
    """Wait until each worker has logged its start, because uvicorn listens before the last worker has started."""
    try:
        async with asyncio.timeout(START_S):
            while log.read_text(errors="replace").count(STARTED) < workers:
                if process.poll() is not None:
                    raise RuntimeError(f"The service ended at startup:\n{log.read_text(errors='replace')[-3000:]}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise RuntimeError(f"The service did not start in {START_S:g} s:\n{log.read_text()[-3000:]}") from None


async def _listening(port: int) -> None:
    """Wait until a process listens on a port. A single process listens only after it logged its start."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


def _clean() -> dict[str, str]:
    """Return this program's environment without options of the service, so that the service runs with its defaults.

    The only option allows callbacks to the receivers, which run on this machine.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    return {**kept, "HALFNOTE_ALLOW_NETWORKS": "127.0.0.0/8,::1/128"}


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
