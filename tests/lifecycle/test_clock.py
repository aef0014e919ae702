"""The estimate of the database's clock: steps of the machine's clock and slow answers do not change it."""

import asyncio
import os
import subprocess
import sys
import time
from urllib.parse import urlsplit

from app.clock import Clock
from app.database.connection import Connection, connect
from tests.support.faulty_proxy import FaultyProxy, through
from tests.support.processes import ROOT
from tests.support.stepped_clock import stepped_clock

# Writes the machine's time, and twice the clock's, for each line that it reads.
PROGRAM = """
import sys, time
from app.clock import Clock
clock = Clock()
for _ in sys.stdin:
    print(time.time(), clock.now().timestamp(), clock.time(), flush=True)
"""
SLOW_S = 1.0


def test_a_step_of_the_machines_clock_changes_nothing() -> None:
    with stepped_clock() as machine:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env={**os.environ, **machine.env},
        )
        with program:
            assert program.stdin is not None
            assert program.stdout is not None
            for step_s in (0, 3600, -3600):
                machine.set(step_s)
                program.stdin.write("\n")
                told, now, unix = map(float, program.stdout.readline().split())
                assert abs(told - step_s - time.time()) < 600
                assert abs(now - time.time()) < 600
                assert abs(unix - time.time()) < 600
            program.stdin.close()


async def test_a_slow_answer_does_not_set_the_clock(dsn: str) -> None:
    """The database is on this machine, so its clock is this one."""
    clock = Clock()
    async with FaultyProxy(urlsplit(dsn).port or 5432) as proxy:
        connection = await connect(through(proxy, dsn))
        for _ in range(3):
            await clock.measure(connection)
        proxy.hold()
        measuring = asyncio.create_task(clock.measure(connection))
        await asyncio.sleep(SLOW_S)
        proxy.release()
        skew_s = await measuring
        await connection.close()
    assert abs(clock.offset_s) < SLOW_S / 3
    assert abs(skew_s) < SLOW_S / 3


async def test_a_clock_that_is_wrong_is_set_at_once(db: Connection) -> None:
    for wrong_s in (3600.0, -3600.0):
        clock = Clock()
        await clock.measure(db)
        clock.offset_s += wrong_s
        await clock.measure(db)
        assert abs(clock.offset_s) < 600
