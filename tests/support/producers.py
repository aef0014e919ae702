"""The producers of examples/ as separate processes, and a proxy between them and Halfnote."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web

from tests.support.processes import ROOT, free_port
from tests.support.requirements import absent

EXAMPLES = ROOT / "examples"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw0000"
DRIVER = Path.home() / ".cache" / "halfnote" / "spark-jars" / "postgresql-42.7.7.jar"
FETCHED = "is not fetched yet: make test-deps"


@dataclass(frozen=True)
class Language:
    """How a producer is run. `programs` must be installed; `fetched`: whether `make test-deps` has added the rest."""

    programs: tuple[str, ...]
    fetched: Callable[[], bool]
    command: Callable[[Path], list[str]]
    database: Callable[[str], str] = lambda url: url


def _built_by_go(directory: Path) -> list[str]:
    program = directory / "producer"
    subprocess.run(["go", "build", "-o", program, "."], cwd=EXAMPLES / "go", check=True, env=_go_offline())
    return [str(program)]


def _go_offline() -> dict[str, str]:
    return {**os.environ, "GOPROXY": "off", "GOFLAGS": "-mod=readonly -buildvcs=false", "GOTOOLCHAIN": "local"}


def _go_version() -> tuple[int, ...]:
    printed = subprocess.run(["go", "env", "GOVERSION"], env=_go_offline(), capture_output=True, text=True, check=True)
    return tuple(map(int, printed.stdout.strip().removeprefix("go").split(".")[:2]))


def _has_go_modules() -> bool:
    listed = subprocess.run(["go", "mod", "verify"], cwd=EXAMPLES / "go", env=_go_offline(), capture_output=True)
    return listed.returncode == 0


def _jdbc(url: str) -> str:
    parts = urlsplit(url)
    return (
        f"jdbc:postgresql://{parts.hostname}:{parts.port}{parts.path}?user={parts.username}&password={parts.password}"
    )


LANGUAGES = {
    "go": Language(("go",), _has_go_modules, _built_by_go, lambda url: f"{url}?sslmode=disable"),
    # A JRE cannot run source files.
    "java": Language(
        ("java", "javac"),
        DRIVER.exists,
        lambda _: ["java", "-cp", str(DRIVER), str(EXAMPLES / "java" / "Producer.java")],
        _jdbc,
    ),
    "node": Language(
        ("node",),
        (EXAMPLES / "node" / "node_modules" / "pg").exists,
        lambda _: ["node", str(EXAMPLES / "node" / "producer.js")],
    ),
}


def require(name: str) -> Language:
    """Return a language whose programs are installed; skip the test, or fail it where `make test-deps` is required."""
    language = LANGUAGES[name]
    lacking = [program for program in language.programs if shutil.which(program) is None]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} is not installed here, so the producer in {name} cannot run")
    if name == "go" and _go_version() < (1, 22):
        pytest.skip("the producer in go needs Go 1.22")
    if not language.fetched():
        absent(f"what the producer in {name} needs {FETCHED}", "DEPS")
    return language


class Producer:
    """One producer. After a `kill` and a new start it listens on the same port."""

    def __init__(self, language: Language, directory: Path, halfnote: str, database: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = language.command(directory)
        self._log = directory / "producer.log"
        own = {"HALFNOTE_URL": halfnote, "DATABASE_URL": language.database(database), "CHECK_SECRET": SECRET}
        self._environment = {**os.environ, **own, "PORT": str(self.port)}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the producer; it listens some time later."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def alive(self) -> bool:
        """Return True while it runs. Raises RuntimeError with its log if it ended by itself."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(self._log.read_text(errors="replace")[-3000:])
        return True

    def kill(self) -> None:
        """kill -9 it and all that it started, unless it has ended."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


Hook = Callable[[str], Awaitable[None]]


async def _nothing(transaction_id: str) -> None:
    """Do nothing; the default hook."""


@dataclass
class HalfnoteProxy:
    """Forwards a producer's requests to Halfnote.

    `after_half` runs between Halfnote's answer to a half and its arrival at the producer, `before_end` before an end is
    forwarded. `halves` are the orders by transaction id; `ends` are Halfnote's answers.
    """

    halfnote: str
    after_half: Hook = _nothing
    before_end: Hook = _nothing
    halves: dict[str, int] = field(default_factory=dict)
    ends: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    async def __aenter__(self) -> "HalfnoteProxy":
        self._client = httpx.AsyncClient(base_url=self.halfnote, timeout=60, limits=httpx.Limits(max_connections=200))
        app = web.Application()
        app.router.add_post("/half", self._half)
        app.router.add_post("/end", self._end)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._client.aclose()

    def reset(self) -> None:
        """Remove the hooks, and clear the records."""
        self.after_half = self.before_end = _nothing
        self.halves, self.ends = {}, []

    async def _half(self, request: web.Request) -> web.Response:
        content = json.loads(await request.read())
        answer = await self._client.post("/half", json=content)
        assert answer.status_code == 201, answer.text
        self.halves[content["transaction_id"]] = content["messages"][0]["body"]["order"]
        await self.after_half(content["transaction_id"])
        return web.Response(status=answer.status_code, body=answer.content, content_type="application/json")

    async def _end(self, request: web.Request) -> web.Response:
        content = json.loads(await request.read())
        await self.before_end(content["transaction_id"])
        answer = await self._client.post("/end", json=content)
        self.ends.append((answer.status_code, answer.json()))
        return web.Response(status=answer.status_code, body=answer.content, content_type="application/json")
