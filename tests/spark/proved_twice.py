"""A day with far less than usual, which one run certifies and a later run proves again: what both said and stored."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import psycopg

from spark.certificate.signing import new_key
from tests.conftest import migrated_template
from tests.spark.days import days_ago, fill_day, prove, rows
from tests.support import postgres

DAY = days_ago(5)
BEFORE = DAY - timedelta(days=1)
USUAL = {"topic": {"order": 10_000}, "group": {"shop": 10_000}, "subscription": {"billing": 10_000}}
SUBJECTS = ["group:shop", "subscription:billing", "topic:order"]
# A receipt of a transaction, once more.
INVENTED = """
insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms,
  status, digest, settled_at, replay)
select transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms, status, digest,
  {at}, {replay}
from receipt where transaction_id = %s
"""
# A replay that runs, and may have that receipt.
REPLAY = """
insert into replay (replay_id, subscription_id, after, until, "offset", state, created_at, moved_at)
overriding system value select 9, subscription_id, 0, 40, 21, 'running', now() - interval '9 days', now()
from subscription
"""


@dataclass(frozen=True)
class Proof:
    """What a run said (`said`, its stdout), and the rows of its database after it."""

    status: int
    said: str
    findings: list[dict[str, Any]]
    certificates: list[dict[str, Any]]
    day: dict[str, Any]


@dataclass(frozen=True)
class ProvedTwice:
    """The database, the directory of the key, `out` and `staging`, and both runs."""

    dsn: str
    place: Path
    first: Proof
    again: Proof


def remember(dsn: str, day: date, *, every: int = 1) -> None:
    """Write what earlier runs stored of the 28 days before, or of one in `every` of them."""
    with psycopg.connect(dsn) as db:
        db.execute(
            "insert into reconciliation_day (day, run_id, state, reconciled_at, counts, found, signature, figures, "
            "volumes) select %s::date - n, 1, 'final', now(), '{}', '{}', '{}', '{}', %s "
            "from generate_series(%s, 28, %s) n",
            [day, json.dumps(USUAL), every, every],
        )


def change(dsn: str, statement: str) -> str:
    """Change the rows of a transaction; return its id."""
    with psycopg.connect(dsn) as db:
        [(found,)] = db.execute("select transaction_id from op order by 1 offset 20 limit 1").fetchall()
        assert db.execute(statement, [found]).rowcount == 1
    return str(found)


@contextmanager
def proved_twice(place: Path) -> Iterator[ProvedTwice]:
    """Make the day of 40 transactions and prove it: first with the day before, which is empty; then alone, without any
    share of what is usual, after a replay has added a receipt."""
    dsn = postgres.create_database(migrated_template())
    try:
        fill_day(dsn, DAY, 40)
        # The same weekday alone: of the day before, nothing is usual.
        remember(dsn, DAY, every=7)
        rows(dsn, "insert into audit (at, what, detail) values (now(), 'topic.declare', '{}') returning 1")
        (place / "key.pub").write_text(new_key(place / "key.pem"))
        kept = ("--staging", place / "staging", "--keep-staging")
        signed = ("--out", place / "out", "--certificate-key", place / "key.pem")
        first = _proof(dsn, "--day", BEFORE, "--day", DAY, *signed, *kept)
        with psycopg.connect(dsn) as db:
            db.execute(REPLAY)
        change(dsn, INVENTED.format(at="now() - interval '1 minute'", replay=9))
        off = [option for subject in SUBJECTS for option in ("--usual-share-of", f"{subject}=0")]
        yield ProvedTwice(dsn, place, first, _proof(dsn, "--day", DAY, *off))
    finally:
        postgres.drop_database(dsn)


def _proof(dsn: str, *options: object) -> Proof:
    with redirect_stdout(io.StringIO()) as said:
        status = prove(dsn, *options)
    [day] = rows(dsn, "select * from reconciliation_day where day = %s", DAY)
    return Proof(
        status,
        said.getvalue(),
        rows(dsn, "select * from finding where resolved_at is null order by subject"),
        rows(dsn, "select * from day_certificate order by sequence"),
        day,
    )
