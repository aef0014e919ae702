"""Changes that a process reads from the database reach it after an outage as soon as before."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.database.connection import Database
from app.lifecycle.loops import all_loops
from app.runtime.loop_runner import Result, run
from app.runtime.state import Runtime
from tests.support.keyed_services import made, start, status

__all__ = ["start"]


@pytest.mark.parametrize("name", ["live_settings", "accept"])
async def test_after_an_outage_a_change_is_read_within_the_loops_interval(start: Callable[..., Any], name: str) -> None:
    runtime, client = await start()
    _, other = await start()
    key = await made(client)
    there, runtime.database = runtime.database, Database("postgresql://nobody@127.0.0.1:9/none", pool_size=2)
    [loop] = [loop for loop in all_loops(runtime) if loop.name == name]
    stopping, tries = asyncio.Event(), 0

    async def counted(runtime: Runtime, now: datetime) -> Result:
        nonlocal tries
        tries += 1
        return await loop.step(runtime, now)

    async def followed() -> bool:
        return runtime.refusing_halves if name == "accept" else await status(client, key["key"]) == 401

    with capture_logs() as logs:
        running = asyncio.create_task(run(replace(loop, step=counted), runtime, stopping))
        async with asyncio.timeout(60):
            while tries < 6:
                await asyncio.sleep(0.05)
            assert (await other.delete(f"/api-keys/{key['key_id']}")).status_code == 204
            assert (await other.put("/accept", json={"accept": "ends"})).status_code == 200
            assert not await followed()
            away, runtime.database = runtime.database, there
            while not await followed():
                await asyncio.sleep(0.05)
        stopping.set()
        await running
    await away.close()
    waits = [line["retry_s"] for line in logs if line["event"] == "loop_failed"]
    assert max(waits) == loop.every_s
    # The lines grow rarer, although the tries do not.
    assert len(waits) < tries
