"""The real service as a separate process, on a data directory and a free port."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.config import LOOPBACK
from tests.support.ports import free_port

__all__ = ["ROOT", "Service", "external_database_options", "free_port", "serving"]

DATABASE = {"HALFNOTE_DATABASE_URL", "HALFNOTE_DATABASE_URL_FILE"}
ROOT = Path(__file__).parents[2]


def external_database_options() -> dict[str, str]:
    """Return the options that an external database needs and the embedded one does not: keys, and open loopback."""
    keys = {name: value for name, value in os.environ.items() if name == "HALFNOTE_SECRETS_KEY_FILE"}
    return {**keys, "HALFNOTE_ALLOW_NETWORKS": ",".join(LOOPBACK)}


class Service:
    """`uvicorn app.main:app` with an embedded Postgres, or with HALFNOTE_DATABASE_URL in `env`.

    With `arguments` it is `halfnote` with these; `root` is the directory of its code.
    """

    def __init__(self, data_dir: Path, *arguments: str, root: Path = ROOT, port: int | None = None, **env: str) -> None:
        self._root = root
        self.port = port or free_port()
        self.url = f"{'https' if 'HALFNOTE_TLS_CERT' in env else 'http'}://127.0.0.1:{self.port}"
        self.log = data_dir.parent / "service.log"
        program = ("app.cli", *arguments) if arguments else ("uvicorn", "app.main:app", "--no-access-log")
        self._command = [sys.executable, "-m", *program, "--port", str(self.port)]
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")},
            "HALFNOTE_DATA_DIR": str(data_dir),
            # One process starts faster. Tests of several set their number.
            "HALFNOTE_WORKERS": "1",
            **(external_database_options() if env.keys() & DATABASE else {}),
            **env,
        }
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, *, stdout: int | None = None) -> None:
        """Start the process and wait until it answers; raises with its log if it ends instead.

        `stdout`: a file descriptor for its standard output; by default the log.
        """
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=self._root,
                env=self._env,
                stdout=log if stdout is None else stdout,
                stderr=log,
                start_new_session=True,
            )
        await self.until_answering()

    async def until_answering(self) -> None:
        """Wait until the service answers; raises with its log if it ends instead."""
        # Whom a client trusts is up to the tests of TLS.
        async with httpx.AsyncClient(base_url=self.url, verify=False) as client, asyncio.timeout(90):
            while True:
                assert self.process is not None
                if self.process.poll() is not None:
                    raise RuntimeError(self.log.read_text())
                try:
                    await client.get("/problems/internal")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.05)

    async def until_ready(self) -> None:
        """Wait until every process of `halfnote serve` serves. If one fails at its first start, the service ends."""
        async with asyncio.timeout(90):
            # The command prints it after the last of them serves.
            while f"Halfnote is ready on {self.url}" not in self.log.read_text():
                assert self.process is not None
                if self.process.poll() is not None:
                    raise RuntimeError(self.log.read_text())
                await asyncio.sleep(0.02)

    def kill(self) -> None:
        """kill -9; its Postgres may continue."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def serving(directory: Path, dsn: str, **env: str) -> Iterator[str]:
    """Run `halfnote serve` over a database until the block ends; yield its URL."""
    options: dict[str, Any] = {"HALFNOTE_DATABASE_URL": dsn, **env}
    service = Service(directory / "data", "serve", **options)
    try:
        asyncio.run(service.start())
        yield service.url
    finally:
        service.stop()
