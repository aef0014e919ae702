"""The profile `rocketmq` of docker-compose.yml under Apache's clients, each container as a process of this machine.

Addresses, ports and directories are this machine's; commands and environments are those of the file. Images, networks
and volumes are left out.
"""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from app.cli.rocketmq import PORT
from tests.support import postgres
from tests.support.ports import free_port
from tests.support.processes import ROOT
from tests.support.rocketmq_clients import DriverCommand, driver, ran, remoting_driver

pytestmark = pytest.mark.timeout(400)

FILE = ROOT / "docker-compose.yml"
ADMIN = "hn_" + "a1B2c3D4" * 8
PASSWORD = "postgrespassword"
WITHIN_S = 90.0
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^{}]*))?\}")
# What Apache's clients for Python and for remoting get of what their drivers send.
OVER_GRPC = {"commit", "orphan-commit", "orphan-unknown", "plain", "delay", "fifo-0", "fifo-1", "fifo-2", "poison"}
OVER_REMOTING = {"commit", "unknown-commit", "unknown-twice", "plain", "delay", "large", "batch-1", "batch-2"}


def services_of(**variables: str) -> dict[str, Any]:
    """Return the services of the file, with these variables in its environment."""

    def value(found: re.Match[str]) -> str:
        name, kind, other = found.groups()
        given = variables.get(name, "")
        assert given or kind == "-", f"{name} {other}"
        return given or str(other)

    text = FILE.read_text()
    # A default may have a variable in it, so the innermost ones come first.
    while VARIABLE.search(text):
        text = VARIABLE.sub(value, text)
    services: dict[str, Any] = yaml.safe_load(text)["services"]
    return services


@dataclass(frozen=True)
class Profile:
    """The running profile: the URL of the API, and where RocketMQ clients connect."""

    url: str
    grpc: str
    remoting: str


class Containers:
    """Services of the file as processes. `moved`: what of the file is elsewhere on this machine."""

    def __init__(self, place: Path, services: dict[str, Any], moved: dict[str, str]) -> None:
        self._place, self._services, self._moved = place, services, moved
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, name: str) -> None:
        """Run a service to its end."""
        subprocess.run(self._command(name), cwd=ROOT, env=self._env(name), check=True, timeout=WITHIN_S)

    def start(self, name: str, *more: str, **env: str) -> None:
        """Start a service; `more` and `env` are of this machine."""
        with self._log(name).open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*self._command(name), *more],
                cwd=ROOT,
                env={**self._env(name), **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def until_healthy(self, name: str, command: list[str], **env: str) -> None:
        """Wait until the health check of a service succeeds; raises with its log if it ends instead."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                check = await asyncio.create_subprocess_exec(
                    *command, env={**os.environ, **env}, stderr=asyncio.subprocess.DEVNULL
                )
                if await check.wait() == 0:
                    return
                if self._processes[name].poll() is not None:
                    raise RuntimeError(self._log(name).read_text())
                await asyncio.sleep(0.2)

    def health_check(self, name: str) -> list[str]:
        """Return the command of a service's own health check."""
        kind, *command = self._services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        return [self._here(part) for part in command]

    def stop(self) -> None:
        """SIGTERM to each, the last one first, as Docker sends it."""
        for name, process in reversed(self._processes.items()):
            process.terminate()
            assert process.wait(timeout=60) == 0, self._log(name).read_text()
            assert "Traceback" not in self._log(name).read_text()

    def _command(self, name: str) -> list[str]:
        service = self._services[name]
        entry = service.get("entrypoint", [sys.executable, "-m", "app.cli"])
        return [*entry, *(self._here(part) for part in service["command"])]

    def _env(self, name: str) -> dict[str, str]:
        given = {variable: self._here(str(value)) for variable, value in self._services[name]["environment"].items()}
        kept = {variable: value for variable, value in os.environ.items() if not variable.startswith("HALFNOTE_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**kept, "PATH": path, "HALFNOTE_DATA_DIR": str(self._place / name), **given}

    def _log(self, name: str) -> Path:
        return self._place / f"{name}.log"

    def _here(self, text: str) -> str:
        for there, here in self._moved.items():
            text = text.replace(there, here)
        return text


@pytest.fixture
def database() -> Iterator[str]:
    """An empty database."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture
async def profile(tmp_path: Path, database: str) -> AsyncIterator[Profile]:
    api, worker, grpc, remoting, operations = (str(free_port()) for _ in range(5))
    services = services_of(
        POSTGRES_PASSWORD=PASSWORD,
        ADMIN_KEY=ADMIN,
        ROCKETMQ_KEY=ADMIN,
        ROCKETMQ_REMOTING_ADDRESS=f"127.0.0.1:{remoting}",
    )
    # The gateway has no option for the port that the file publishes.
    assert f"127.0.0.1:{PORT}:{PORT}" in services["rocketmq"]["ports"]
    assert "127.0.0.1:8080:8080" in services["api"]["ports"]
    (tmp_path / "keys").mkdir()
    moved = {
        f"postgresql://halfnote:{PASSWORD}@postgres:5432/halfnote": database,
        "http://api:8080": f"http://127.0.0.1:{api}",
        "/keys/": f"{tmp_path}/keys/",
        "--remoting-port=9876": f"--remoting-port={remoting}",
        "--operations-port=9090": f"--operations-port={operations}",
        "127.0.0.1:9090": f"127.0.0.1:{operations}",
        "/opt/halfnote/bin/python": sys.executable,
    }
    whole = str([services[name] for name in ("keys", "migrate", "api", "worker", "rocketmq")])
    assert [there for there in moved if there not in whole] == []
    containers = Containers(tmp_path, services, moved)
    of_image = [sys.executable, str(ROOT / "images" / "healthcheck")]
    with ExitStack() as stack:
        for name in ("keys", "migrate"):
            containers.run(name)
        stack.callback(containers.stop)
        for name, port in (("api", api), ("worker", worker)):
            containers.start(name, HALFNOTE_PORT=port)
        for name, port in (("api", api), ("worker", worker)):
            await containers.until_healthy(name, of_image, HALFNOTE_PORT=port)
        containers.start("rocketmq", "--port", grpc)
        await containers.until_healthy("rocketmq", containers.health_check("rocketmq"))
        yield Profile(f"http://127.0.0.1:{api}", f"127.0.0.1:{grpc}", f"127.0.0.1:{remoting}")


async def ran_scenario(profile: Profile, command: DriverCommand, endpoint: str, *arguments: str) -> dict[str, set[str]]:
    """Run a driver whose checks and retries come after a second; return the bodies of what it got, by kind."""
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with httpx.AsyncClient(base_url=profile.url, headers=headers, timeout=60) as admin:
        for group in ("order", "shop"):
            shape = {"checks": "claim", "immunity_s": 1, "interval_s": 1}
            assert (await admin.put(f"/producer-groups/{group}", json=shape)).status_code == 201
        pulled = {"topics": ["order"], "destination": {"type": "pull"}, "retry": [1, 1, 1]}
        for name, ordered in (("points", "none"), ("points-push", "none"), ("points-fifo", "key")):
            answer = await admin.put(f"/subscriptions/{name}@order", json={**pulled, "ordered": ordered})
            assert answer.status_code == 201
    found: dict[str, set[str]] = {}
    for one in await ran(command, endpoint, *arguments):
        found.setdefault(one["what"], set()).add(one.get("body", ""))
    return found


async def test_a_client_over_grpc_sends_and_receives_transactions(profile: Profile, tmp_path: Path) -> None:
    place = tmp_path / "driver"
    place.mkdir()
    found = await ran_scenario(profile, driver("python", place), profile.grpc, "order", "points", "", "", "0")
    assert found["checked"] == {"orphan-commit", "orphan-rollback", "orphan-unknown"}
    assert found["received"] == OVER_GRPC
    assert found["pushed"] == OVER_GRPC


async def test_a_client_over_remoting_sends_and_consumes_transactions(profile: Profile, tmp_path: Path) -> None:
    place = tmp_path / "driver"
    place.mkdir()
    command = remoting_driver("5.5.0", place, "scenario")
    found = await ran_scenario(profile, command, profile.remoting, "order", "shop", "points", "", "")
    assert {"unknown-commit", "unknown-twice"} <= found["checked"]
    assert found["consumed"] >= OVER_REMOTING
    assert not any("rollback" in body for body in found["consumed"])
