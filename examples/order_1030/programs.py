"""The programs of the comparison as separate processes, which are killed and restarted on the same port."""

import asyncio
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from demo.processes import StepFailed

HOST = "127.0.0.1"
START_S, STOP_S = 60.0, 15.0
# A fork server with all imports done: a restart takes milliseconds instead of seconds of imports.
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_context: Any = multiprocessing.get_context(_METHOD)


class Program:
    """A FastAPI app as a process. It restarts after its death, unless it is marked `down`."""

    def __init__(self, create_app: Callable[[Any], FastAPI], options: Any, log: Path) -> None:
        self._arguments = (create_app, options, log)
        # This socket is bound but does not listen: while the process is dead, no other process gets the port, and
        # callers are refused.
        self._reserved = listening_socket(0)
        self.port = int(self._reserved.getsockname()[1])
        self.url = f"http://{HOST}:{self.port}"
        self._log = log
        self.deaths = 0
        self.down = False
        self._process: BaseProcess | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it and wait until it listens; from then on it restarts after its death."""
        self.down = False
        self._launch()
        await self.until_listening()
        self._watching = asyncio.create_task(self._watch())

    async def kill(self) -> None:
        """SIGKILL, and no new start until `start`."""
        self.down = True
        self.deaths += 1
        await self._end(lambda process: process.kill())

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not react."""
        self.down = True
        await self._end(lambda process: process.terminate())
        self._reserved.close()

    async def until_listening(self) -> None:
        """Wait until it takes connections. Raises StepFailed."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                _, writer = await asyncio.open_connection(HOST, self.port)
            except OSError:
                await asyncio.sleep(0.01)
            else:
                writer.close()
                return
        said = self._log.read_text()[-2000:] if self._log.exists() else "its log is empty"
        raise StepFailed(f"a process did not start within {START_S:g} s: {said}")

    def _launch(self) -> None:
        self._process = _context.Process(target=serve, args=(self.port, *self._arguments), daemon=True)
        self._process.start()

    async def _watch(self) -> None:
        while True:
            assert self._process is not None
            await ended(self._process)
            self.deaths += 1
            self._launch()

    async def _end(self, how: Callable[[BaseProcess], None]) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        if self._process is not None:
            how(self._process)
            try:
                await asyncio.wait_for(ended(self._process), STOP_S)
            except TimeoutError:
                self._process.kill()
                await ended(self._process)
            self._process = None


async def ended(process: BaseProcess) -> None:
    """Wait until a process is gone."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def preload() -> None:
    """Let the fork server import the modules that all programs need."""
    if _METHOD == "forkserver":
        _context.set_forkserver_preload([f"{__package__}.{name}" for name in ("bank", "consumer", "shop", "programs")])


def serve(port: int, create_app: Callable[[Any], FastAPI], options: Any, log: Path) -> None:
    """Serve an app until SIGTERM, or until the parent process is gone. Logs go to a file."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    logging.basicConfig(filename=log, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    config = uvicorn.Config(create_app(options), log_config=None, access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listening_socket(port)])


def listening_socket(port: int) -> socket.socket:
    """Return a socket on this port, or on a port that the kernel chooses; processes of one user can share a port."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((HOST, port))
    return made


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
