"""The plans of the relay while days are empty. They live on until a day is analyzed, and it is full by then."""

import re
from collections.abc import Sequence
from uuid import UUID

import pytest

from app.database.connection import Database
from app.store.checkback.sweeps import NEXT_DUE
from app.store.relay.log import LOG_HEAD, READER, WINDOW
from app.store.relay.results import FIRST_TRIES, OUTCOMES, SETTLE, SETTLE_FIRST_TRIES, SETTLE_NEW_FIRST_TRIES, STREAMS
from app.store.relay.retries import CLAIM_RETRIES, CLAIMANTS
from app.store.relay.unrouted import TOPICS_AFTER

BIG = re.compile(r" on (?:half|op|outbox|receipt|attempt)_\d{8}")
SETTLED = ["text", "timestamptz", *STREAMS.types, *FIRST_TRIES.types]


@pytest.mark.parametrize(
    ("statement", "types"),
    [
        (LOG_HEAD, []),
        (WINDOW, READER.types),
        (SETTLE_FIRST_TRIES, SETTLED),
        (SETTLE_NEW_FIRST_TRIES, SETTLED),
        (SETTLE, [*SETTLED, *OUTCOMES.types]),
        (CLAIM_RETRIES, [*CLAIMANTS.types, "text", "timestamptz", "timestamptz"]),
        (NEXT_DUE, ["timestamptz", "uuid"]),
        (TOPICS_AFTER, ["bigint", "int"]),
    ],
    ids=[
        "log_head",
        "window",
        "settle_first_tries",
        "settle_new_first_tries",
        "settle",
        "claim_retries",
        "next_due",
        "topics_after",
    ],
)
async def test_a_plan_of_empty_days_scans_no_whole_day(dsn: str, statement: str, types: Sequence[str]) -> None:
    database = Database(dsn, pool_size=1)
    async with database.keyed() as connection:
        # The planner now knows that the tables are empty, and prefers a whole scan.
        await connection.execute("vacuum (analyze) half, op, outbox, receipt, attempt")
        taken = f"({', '.join(types)})" if types else ""
        await connection.execute(f"prepare one{taken} as {statement}")
        # With a null no day's halves could be due, and the plan would show none.
        values = ["now()", f"'{UUID(int=0)}'"] if statement is NEXT_DUE else ["null"] * len(types)
        nothing = f"({', '.join(values)})" if types else ""
        plan = [row[0].strip() for row in await connection.fetch(f"explain (costs off) execute one{nothing}")]
    await database.close()

    reads = [line for line in plan if "Scan" in line and BIG.search(line)]
    # A settle reads none of them.
    assert bool(reads) is (statement not in (SETTLE, SETTLE_FIRST_TRIES, SETTLE_NEW_FIRST_TRIES))
    assert [line for line in reads if "Seq Scan" in line] == []
    if statement is TOPICS_AFTER:
        # Merged in the order of the index.
        assert [line for line in plan if "Sort" in line and "Sort Key: o." not in line] == []
    if statement is NEXT_DUE:
        # The first row of each day's index, and no other.
        assert [line for line in plan if "Sort" in line and "Sort Key: half" not in line] == []
