"""What runs of the nightly proof leave in the database, for tests of the API, the CLI and the announcements."""

import json
from datetime import UTC, date, datetime, timedelta
from typing import Any

from app.database.connection import Connection

DAY = date(2026, 11, 20)
AT = datetime(2026, 11, 21, 3, tzinfo=UTC)
SCORE = {"complete": 99.98, "agreed": 100.0, "timely": 99.99, "orderly": 100.0}
ID = "019a9f1c-1030-7b1e-8f00-1030a1030a10"


async def reconciled(db: Connection, state: str = "findings", *days: date, **columns: Any) -> int:
    """Write a run and the days that it proved; return its id."""
    row: dict[str, Any] = {
        "open": 0,
        "new": 0,
        "resolved": 0,
        "error": None,
        "seen_at": AT,
        "ended_at": AT,
        "source": "primary",
    }
    row |= columns
    run_id: int = await db.fetchval(
        "insert into reconciliation_run (state, engine, source, seen_at, started_at, ended_at, days, open, new, "
        "resolved, seconds, error) values ($1, 'local[2]', $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) returning run_id",
        state,
        row["source"],
        row["seen_at"],
        row["ended_at"] - timedelta(seconds=90),
        row["ended_at"],
        list(days),
        row["open"],
        row["new"],
        row["resolved"],
        json.dumps({"read": 8.5, "join": 12}),
        row["error"],
    )
    for day in days:
        await looked_at(db, day, run_id)
    return run_id


async def looked_at(db: Connection, day: date, run_id: int, state: str = "provisional", **found: int) -> None:
    """Write the record of a day that a run proved."""
    await db.execute(
        "insert into reconciliation_day (day, run_id, state, reconciled_at, counts, found, signature, figures, "
        "score) values ($1, $2, $3, $4, $5, $6, '{}', $7, $8) on conflict (day) do update set "
        "run_id = excluded.run_id, state = excluded.state, found = excluded.found",
        day,
        run_id,
        state,
        AT,
        json.dumps({"half": 1030, "op": 1030}),
        json.dumps(found),
        json.dumps({"hours": [{"hour": 8, "committed": 1030}]}),
        json.dumps(SCORE),
    )


async def find(db: Connection, kind: str, subject: str, day: date = DAY, **columns: Any) -> int:
    """Write an open finding of run 1; `columns` replace its columns. Return its id."""
    row = {"first_run": 1, "last_run": 1, "detail": "{}", "first_seen_at": AT, "last_seen_at": AT} | columns
    names = ", ".join(row)
    marks = ", ".join(f"${index}" for index in range(4, len(row) + 4))
    finding_id: int = await db.fetchval(
        f"insert into finding (day, kind, subject, {names}) values ($1, $2, $3, {marks}) returning finding_id",
        day,
        kind,
        subject,
        *row.values(),
    )
    return finding_id


async def find_many(db: Connection, kind: str, count: int, day: date = DAY) -> None:
    """Write `count` open findings with the subjects `<kind>-<n>` from 1."""
    await db.execute(
        "insert into finding (day, kind, subject, detail, first_run, first_seen_at, last_run, last_seen_at) "
        "select $1, $2::text, $2 || '-' || n, '{}', 1, $3, 1, $3 from generate_series(1, $4::int) n",
        day,
        kind,
        AT,
        count,
    )


async def resolve(db: Connection, subject: str, run_id: int = 2) -> None:
    """Mark a finding as resolved by a run."""
    await db.execute("update finding set resolved_run = $2, resolved_at = $3 where subject = $1", subject, run_id, AT)


async def reopen(db: Connection, subject: str, run_id: int = 3) -> None:
    """Open a resolved finding again, as a run does that finds it again."""
    await db.execute(
        "update finding set resolved_run = null, resolved_at = null, announced_at = null, last_run = $2 "
        "where subject = $1",
        subject,
        run_id,
    )
