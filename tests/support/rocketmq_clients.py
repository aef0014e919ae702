"""Apache's own clients for RocketMQ 5, from their registries, each run by its driver in tests/rocketmq/drivers."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT
from tests.support.requirements import absent

CACHE = Path.home() / ".cache" / "halfnote"
DRIVERS = ROOT / "tests" / "rocketmq" / "drivers"
# As scripts/test-deps installs them.
PYTHON = CACHE / "rocketmq-client-python-5.1.2"
JAVA = CACHE / "rocketmq-client-java-5.2.0"
REMOTING_VERSIONS = ("4.9.8", "5.5.0")
NODE = CACHE / "rocketmq-client-nodejs-1.0.8"
# A driver waits up to 100 s for what is to come, and on a busy machine as long for its start and its sends.
WITHIN_S = 240.0
# The first build of Go's client compiles all that it needs: minutes on a machine that does other work too.
COMPILED_WITHIN_S = 900.0


@dataclass(frozen=True)
class DriverCommand:
    """How to run a driver."""

    arguments: tuple[str, ...]
    env: dict[str, str]


def driver(language: str, place: Path) -> DriverCommand:
    """Return the command of a language's driver, compiled into `place` if needed. Skips without the client."""
    if language == "python":
        python = PYTHON / "bin" / "python"
        if not (PYTHON / "installed").exists():
            absent("needs Apache's client for Python: make test-deps", "DEPS")
        return DriverCommand((str(python), str(DRIVERS / "python" / "driver.py")), {})
    if language == "java":
        return java_driver("Driver", place)
    if language == "go":
        if shutil.which("go") is None:
            absent("needs Go, and Apache's client for it: make test-deps", "DEPS")
        env = {**os.environ, "GOFLAGS": "-mod=readonly", "GOPROXY": "off"}
        built = subprocess.run(
            ["go", "build", "-o", str(place / "driver"), "."],
            cwd=DRIVERS / "go",
            env=env,
            capture_output=True,
            text=True,
            timeout=COMPILED_WITHIN_S,
        )
        if "module lookup disabled" in built.stderr:
            absent("needs Apache's client for Go: make test-deps", "DEPS")
        assert built.returncode == 0, built.stderr
        return DriverCommand((str(place / "driver"),), {"rocketmq.client.enableSsl": "false", "HOME": str(place)})
    if not (NODE / "node_modules" / "rocketmq-client-nodejs").exists() or shutil.which("node") is None:
        absent("needs Apache's client for Node: Node, and make test-deps", "DEPS")
    return DriverCommand(
        ("node", str(DRIVERS / "node" / "driver.cjs")), {"NODE_PATH": str(NODE / "node_modules"), "HOME": str(place)}
    )


def java_driver(name: str, place: Path) -> DriverCommand:
    """Return the command of a driver of the client for Java, compiled into `place`. Skips without the client."""
    if not list(JAVA.glob("rocketmq-client-java-*.jar")) or shutil.which("javac") is None:
        absent("needs Apache's client for Java: a JDK, and make test-deps", "DEPS")
    compiled = ["javac", "-cp", f"{JAVA}/*", "-d", str(place), str(DRIVERS / "java" / f"{name}.java")]
    subprocess.run(compiled, check=True, timeout=COMPILED_WITHIN_S)
    options = ("-Xmx256m", f"-Drocketmq.log.root={place}", f"-Duser.home={place}")
    return DriverCommand(("java", *options, "-cp", f"{place}:{JAVA}/*", name), {})


def remoting_driver(version: str, place: Path, what: str, *more: str) -> DriverCommand:
    """Return the command of the driver for remoting with a version of the client. Skips without the client.

    `more`: options of Java.
    """
    jars = CACHE / f"rocketmq-client-{version}"
    if not list(jars.glob("rocketmq-client-*.jar")) or shutil.which("javac") is None:
        absent("needs Apache's client for remoting: a JDK, and make test-deps", "DEPS")
    if not (place / "RemotingDriver.class").exists():
        source = DRIVERS / "remoting" / "RemotingDriver.java"
        compiled = ["javac", "-nowarn", "-cp", f"{jars}/*", "-d", str(place), str(source)]
        subprocess.run(compiled, check=True, timeout=COMPILED_WITHIN_S)
    logs = f"-Drocketmq.client.logRoot={place}"
    options = ("-Xmx256m", logs, f"-Drocketmq.log.root={place}", f"-Duser.home={place}", *more)
    return DriverCommand(("java", *options, "-cp", f"{place}:{jars}/*", "RemotingDriver", what), {})


async def ran(command: DriverCommand, *arguments: str) -> list[dict[str, Any]]:
    """Run a driver to its end; return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        *arguments,
        env={**os.environ, **command.env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    talking = asyncio.create_task(process.communicate())
    try:
        await asyncio.wait({talking}, timeout=WITHIN_S)
    finally:
        if process.returncode is None:
            process.kill()
    # Of a driver that did not end too, so that the error shows where it stood.
    out, err = await talking
    said = [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]
    # The thread of a consumer may print once more after that.
    assert "done" in [one["what"] for one in said], f"{out.decode()[-3000:]}\n{err.decode()[-3000:]}"
    return said


class RunningDriver:
    """A driver that runs, and what it has said so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: list[dict[str, Any]] = []

    async def next(self, *what: str) -> dict[str, Any]:
        """Read on until it says one of these; return that."""
        assert self._process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            while True:
                line = await self._process.stdout.readline()
                assert line, f"the driver ended after {self.said[-5:]}"
                if self._hear(line) and self.said[-1]["what"] in what:
                    return self.said[-1]

    async def until(self, what: str, *bodies: str) -> None:
        """Read on until it has said this of each body."""
        while not set(bodies) <= {one["body"] for one in self.said if one["what"] == what}:
            await self.next(what)

    def answer(self) -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go on\n")

    async def kill(self) -> None:
        """kill -9; what it said before counts."""
        assert self._process.stdout is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        # It may have died within its last line.
        while (line := await self._process.stdout.readline()).endswith(b"\n"):
            self._hear(line)

    def _hear(self, line: bytes) -> bool:
        if not line.startswith(b"{"):
            return False
        self.said.append(json.loads(line))
        return True


@asynccontextmanager
async def running(command: DriverCommand, *arguments: str) -> AsyncIterator[RunningDriver]:
    """Run a driver until the block ends."""
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        *arguments,
        env={**os.environ, **command.env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    driver = RunningDriver(process)
    try:
        yield driver
    finally:
        await driver.kill()
