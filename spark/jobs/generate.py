"""Generates days of any size, into Postgres as if a service had run that day, or as Parquet for the proof.

    python -m spark.jobs.generate --database-url postgresql://… --transactions 3000000 --faults 1000
    python -m spark.jobs.generate --parquet DIRECTORY --day 2026-11-20 --transactions 3000000

The same seed and size make the same rows. Without `--faults` the rules find nothing. They find each planted fault once;
planted.json or DIRECTORY-planted.json lists them, `{kind: [subject, …]}`. Do not use it on a database in use.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path

import psycopg
from pyspark.sql import SparkSession

from spark.engine.session import session
from spark.schemas import BIG
from spark.synthetic import archived as archive
from spark.synthetic import parquet, postgres
from spark.synthetic.faults import TooFewError
from spark.synthetic.plan import ALLOWED, FORBIDDEN, LEDGERS, Plan

Fill = Callable[[Plan, int], tuple[dict[str, int], dict[str, list[str]]]]
DATABASE_URL = "HALFNOTE_DATABASE_URL"


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0: done; 1: it failed; 2: wrong usage."""
    given = _parser().parse_args(argv)
    dsn: str = given.database_url or os.environ.get(DATABASE_URL) or ""
    if given.parquet is None and not dsn:
        print(f"The destination is missing: give --database-url (or set {DATABASE_URL}) or --parquet.", file=sys.stderr)
        return 2
    if given.archived and given.parquet is None:
        print("--archived needs --parquet.", file=sys.stderr)
        return 2
    try:
        if given.parquet is not None:
            plan = _plan(given, given.day or _long_ago())
            to_parquet(given.parquet, plan, given.planted, archived=given.archived, master=given.master)
        else:
            plan = _plan(given, given.day or postgres.default_day(dsn))
            to_postgres(dsn, plan, given.planted, unconstrained=given.unconstrained, master=given.master)
    except (psycopg.Error, OSError, TooFewError, postgres.NotEmptyError) as error:
        print(f"No day was made: {error}", file=sys.stderr)
        return 1
    return 0


def planted_beside(directory: Path) -> Path:
    """Return the file that lists the faults of a day below a directory.

    It is not in the directory, because an archive's manifest covers each file there.
    """
    return directory.with_name(f"{directory.name}-planted.json")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="generate", description="Generate a day, in Postgres or as Parquet.")
    parser.add_argument("--database-url", metavar="URL", help=f"URL of the Postgres; default: {DATABASE_URL}")
    parser.add_argument("--parquet", type=Path, metavar="DIR", help="write Parquet to DIR instead")
    parser.add_argument("--day", type=date.fromisoformat, help="default: two days ago (Parquet: five days ago)")
    parser.add_argument("--transactions", type=_at_least(1), default=100_000, metavar="N")
    parser.add_argument("--subscriptions", type=_at_least(2), default=4, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--faults", type=_at_least(0), default=0, metavar="N", help="plant N faults, of each kind in turn"
    )
    parser.add_argument(
        "--unconstrained",
        action="store_true",
        help="also plant faults that constraints forbid: outbox gets an index in place of its primary key; only for an "
        "empty database",
    )
    parser.add_argument("--ledgers", type=Path, metavar="DIR", help="also write ledgers, DIR/producer and DIR/consumer")
    parser.add_argument(
        "--archived",
        action="store_true",
        help="also write the manifest of an archive; with --faults, some rows change after that",
    )
    parser.add_argument(
        "--planted", type=Path, metavar="FILE", help="default: DIR-planted.json beside DIR, or planted.json"
    )
    parser.add_argument("--master", help="Spark's master; default: local[*]")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"at least {least}")
        return value

    return number


def _plan(given: argparse.Namespace, day: date) -> Plan:
    if day >= datetime.now(UTC).date():
        raise SystemExit("A day must be over before it is made: choose an earlier --day.")
    # Parquet has no constraints.
    kinds: tuple[str, ...] = ALLOWED + FORBIDDEN if given.unconstrained or given.parquet is not None else ALLOWED
    if given.ledgers is not None:
        kinds += LEDGERS
    ids = tuple(range(1, given.subscriptions + 1))
    ledgers = None if given.ledgers is None else given.ledgers.resolve()
    return Plan(day, given.seed, given.transactions, faults=given.faults, kinds=kinds, ids=ids, ledgers=ledgers)


def _long_ago() -> date:
    return datetime.now(UTC).date() - timedelta(days=5)


def to_parquet(
    directory: Path, plan: Plan, planted: Path | None = None, *, archived: bool = False, master: str | None = None
) -> dict[str, int]:
    """Write a day below a directory; return its rows by table. Raises OSError, TooFewError.

    `archived`: as an archive, with a manifest.
    """
    began = time.monotonic()
    plan = replace(plan, seen_at=parquet.default_seen_at(plan))
    directory.mkdir(parents=True, exist_ok=True)
    rows, subjects = _fill(plan, partial(parquet.fill, directory.resolve()), master)
    parquet.finish(directory, plan)
    if archived:
        archive.finish(session(master), directory, plan)
        subjects |= archive.plant(directory) if plan.faults else {}
    _report(rows, subjects, began, planted or planted_beside(directory))
    return rows


def to_postgres(
    dsn: str, plan: Plan, planted: Path | None = None, *, unconstrained: bool = False, master: str | None = None
) -> dict[str, int]:
    """Write a day into Postgres; return its rows by table. Raises psycopg's errors, NotEmptyError, TooFewError."""
    began = time.monotonic()
    plan = postgres.prepare(dsn, plan, len(plan.ids), unconstrained=unconstrained)
    rows, subjects = _fill(plan, partial(postgres.fill, dsn), master)
    # Each table's indexes are built on a separate connection; the largest table first.
    with ThreadPoolExecutor(2) as two:
        list(two.map(partial(postgres.attach, dsn, plan), BIG))
    postgres.finish(dsn, plan)
    _report(rows, subjects, began, planted or Path("planted.json"))
    return rows


def _fill(plan: Plan, fill: Fill, master: str | None) -> tuple[Counter[str], dict[str, list[str]]]:
    """Make each chunk in one of Spark's workers, and sum the results."""
    spark: SparkSession = session(master)
    context = spark.sparkContext
    if str(context.master).startswith("local"):
        # Workers on this machine use this program's Python, not the PATH's.
        context.pythonExec = sys.executable
    numbers = context.parallelize(range(plan.chunks), plan.chunks)
    rows: Counter[str] = Counter()
    subjects: dict[str, list[str]] = {}
    for made, planted in numbers.map(partial(fill, plan)).collect():
        rows.update(made)
        for kind, found in planted.items():
            subjects.setdefault(kind, []).extend(found)
    return rows, subjects


def _report(rows: dict[str, int], subjects: dict[str, list[str]], began: float, planted: Path) -> None:
    seconds = time.monotonic() - began
    if subjects:
        planted.write_text(json.dumps(subjects, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    total = sum(rows.values())
    each = ", ".join(f"{name} {count:,}" for name, count in rows.items())
    print(f"{total:,} rows in {seconds:.1f} s ({total / seconds:,.0f} a second): {each}")


if __name__ == "__main__":
    sys.exit(main())
