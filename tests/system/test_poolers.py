"""The service behind a real pgbouncer: in session mode it works; in the other modes it refuses with the reason."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.database.connection import Connection
from tests.support.check_responder import Responder
from tests.support.pgbouncer import Mode, pooling
from tests.support.processes import ROOT, Service, free_port
from tests.support.relay_stepping import order, subscribe


@pytest.fixture
async def receiver() -> AsyncIterator[Responder]:
    async with Responder() as responder:
        yield responder


async def test_in_session_mode_a_message_is_committed_and_delivered(
    data_dir: Path, dsn: str, db: Connection, group: str, receiver: Responder
) -> None:
    with pooling(dsn, "session") as url:
        service = Service(data_dir, "serve", HALFNOTE_DATABASE_URL=url)
        await service.start()
        try:
            async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
                ready = await client.get("/readyz")
                assert ready.status_code == 200, ready.text
                await subscribe(client, receiver)
                for number in range(3):
                    half = {"producer_group": "shop", "messages": [order(number)]}
                    transaction_id = (await client.post("/half", json=half)).json()["transaction_id"]
                    end = {"transaction_id": transaction_id, "producer_group": "shop", "verdict": "commit"}
                    assert (await client.post("/end", json=end)).status_code == 200
                async with asyncio.timeout(120):
                    while await db.fetchval("select count(*) from receipt") < 3:
                        await asyncio.sleep(0.05)
        finally:
            assert service.stop() == 0
    assert sorted(call.json()["order"] for call in receiver.calls) == [0, 1, 2]
    # The service's connection settings are effective behind a pooler as well.
    assert "unsupported startup parameter" not in service.log.read_text()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
def test_in_the_other_modes_the_start_explains_and_refuses(dsn: str, mode: Mode) -> None:
    with pooling(dsn, mode) as url:
        # The second command may get a session in which the first left a setting.
        for command in ("serve", "migrate"):
            completed = subprocess.run(
                [sys.executable, "-m", "app.cli", command],
                cwd=ROOT,
                env={"PATH": "", "HALFNOTE_DATABASE_URL": url, "HALFNOTE_PORT": str(free_port())},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert completed.returncode != 0
            assert "leads to a transaction pooler" in completed.stderr
            assert "session mode" in completed.stderr
            assert "Traceback" not in completed.stderr
