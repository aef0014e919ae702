"""The plans of the flushes while days are empty. They live on until a day is analyzed, and it is full by then."""

import re
from collections.abc import AsyncIterator

import pytest

from app.database.connection import Connection, Database
from app.store.coordinator.halves import STORED_HALVES
from app.store.coordinator.ops import READ_RECORDED, RECORD_ENDS, RECORD_ENDS_OF_CHECKS, RECORD_FIRST_ENDS

BIG = re.compile(r"on ((?:half|op|outbox)_\d{8})")


@pytest.fixture
async def lane(dsn: str) -> AsyncIterator[Connection]:
    """A connection as a lane has it, to a database whose days are all empty."""
    database = Database(dsn, pool_size=2)
    connection = await database.dedicated()
    # The tables were analyzed: the planner now knows that they are empty, and prefers a whole scan.
    await connection.execute("vacuum (analyze) half, op, outbox")
    yield connection
    await connection.close()
    await database.close()


@pytest.mark.parametrize(
    ("statement", "nothing"),
    [
        (RECORD_ENDS, "'{}', '{}', '{}', '{}', '{}', '{}', '{}', now()"),
        (RECORD_FIRST_ENDS, "'{}', '{}', '{}', '{}', '{}', '{}', '{}', now()"),
        (RECORD_ENDS_OF_CHECKS, "'{}', " * 7 + "now()" + ", '{}'" * 10),
        (READ_RECORDED, "'{}', '{}', '{}', '{}', now()"),
        (STORED_HALVES, "'{}', '{}'"),
    ],
    ids=["record_ends", "record_first_ends", "record_ends_of_checks", "read_recorded", "stored_halves"],
)
async def test_a_plan_of_empty_days_looks_up_by_primary_key(lane: Connection, statement: str, nothing: str) -> None:
    await lane.execute(f"prepare flush as {statement}")
    plan = [row[0].strip() for row in await lane.fetch(f"explain (costs off) execute flush({nothing})")]

    reads = [line for line in plan if BIG.search(line) and "Scan" in line and "Bitmap Heap" not in line]
    indexes = [line for line in plan if re.search(r"(?:Bitmap )?Index (?:Only )?Scan (?:using|on) \w+_\d{8}_\w+", line)]
    assert reads
    assert [line for line in reads if "Seq Scan" in line] == []
    assert [line for line in indexes if "_pkey" not in line] == []
