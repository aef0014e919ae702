"""The comparisons in Postgres look at every transaction in which they would find something: the search names it."""

from collections.abc import Callable
from datetime import timedelta
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark.transforms.screen.compared import COMPARISONS, Compared
from spark.transforms.screen.day_files import READ
from spark.transforms.screen.numbered import numbered
from spark.transforms.screen.row_groups import arrow_schema
from tests.spark.frames import SEEN_AT, Day, born, id_of

CLOCKS_S, IDS_S = 5.0, 70.0
# Of another version than 7, whose time is not known.
OTHER_ID = id_of(3).replace("-7", "-4", 1)


def a_day() -> Day:
    """Transactions of one and of two messages, delays, keys, one rolled back, one without a verdict."""
    day = Day()
    for number in range(1, 9):
        day.committed(number, messages=1 + number % 2, key=f"key-{number}", tag="red")
    day.half(20, deliver_after_s=60.0)
    day.op(20)
    day.sent(20, due_at=born(81))
    day.received(20, first_at=born(90), settled_at=born(91))
    # A broker's receipts have no status.
    day.committed(21)
    day.rows["receipt"][-1] |= {"status": None, "subscription_id": 9}
    day.rolled_back(30)
    day.half(31)
    return day


def named(day: Day, comparison: str) -> set[str]:
    """Return the ids of the transactions that the comparison must look at."""
    tables = {
        name: pa.Table.from_pylist(
            [{column: row.get(column) for column in READ[name].names} for row in day.rows[name]],
            arrow_schema(READ[name]),
        )
        for name in READ
        if name in day.rows
    }
    n = numbered(tables)
    by = Compared(SEEN_AT, CLOCKS_S, IDS_S, 24, 3_600_000, frozenset({1}), Event())
    return set(np.asarray(n.ids)[COMPARISONS[comparison](n, by)])


def changed(table: str, number: int, position: int = 0, /, **columns: Any) -> Callable[[Day], None]:
    """Return a change of one row of the day."""

    def change(day: Day) -> None:
        for row in day.rows[table]:
            if row["transaction_id"] == id_of(number) and row.get("position", 0) == position:
                row |= columns
                return
        raise AssertionError("no such row")

    return change


def twice(table: str, number: int) -> Callable[[Day], None]:
    """Return a change that repeats a row of the day."""

    def change(day: Day) -> None:
        day.rows[table].append(next(dict(row) for row in day.rows[table] if row["transaction_id"] == id_of(number)))

    return change


def gone(table: str, number: int, position: int = 0) -> Callable[[Day], None]:
    """Return a change that loses a row of the day."""

    def change(day: Day) -> None:
        day.rows[table] = [
            row
            for row in day.rows[table]
            if row["transaction_id"] != id_of(number) or row.get("position", 0) != position
        ]

    return change


def renamed(number: int, other: str) -> Callable[[Day], None]:
    """Return a change that gives a transaction another id."""

    def change(day: Day) -> None:
        for rows in day.rows.values():
            for row in rows:
                if row.get("transaction_id") == id_of(number):
                    row["transaction_id"] = other

    return change


LATE = SEEN_AT + timedelta(seconds=CLOCKS_S, microseconds=1)
MICROSECOND = timedelta(microseconds=1)
# As the driver reads Postgres's `infinity`.
INFINITY = -9_222_425_352_054_775_809
DIFFER: dict[str, tuple[int, Callable[[Day], None]]] = {
    "topic": (1, changed("outbox", 1, 1, topic="Order")),
    "key": (2, changed("outbox", 2, key="other")),
    "key lost": (2, changed("outbox", 2, key=None)),
    "key of half lost": (2, changed("half", 2, key=None)),
    "tag": (3, changed("half", 3, 1, tag=None)),
    "due without a delay": (4, changed("outbox", 4, due_at=born(5))),
    "delay without a due time": (4, changed("half", 4, deliver_after_s=5.0)),
    "due too early": (20, changed("outbox", 20, due_at=born(81) - MICROSECOND)),
    "a fraction": (20, changed("half", 20, deliver_after_s=60.25)),
    "committed at another time": (1, changed("outbox", 1, 1, committed_at=born(2) + MICROSECOND)),
    "no first message": (1, gone("outbox", 1)),
    "born in the future": (30, changed("half", 30, born_at=LATE, first_check_at=LATE)),
    "born far from its id": (30, changed("half", 30, born_at=born(30 + 70), first_check_at=born(101))),
    "no UUIDv7": (3, renamed(3, OTHER_ID)),
    "first check before birth": (31, changed("half", 31, first_check_at=born(30))),
    "first check much later": (31, changed("half", 31, first_check_at=born(31 + 86_400) + MICROSECOND)),
    "an endless birth": (31, changed("half", 31, born_at=INFINITY, first_check_at=INFINITY)),
    "an endless commit": (20, changed("outbox", 20, committed_at=INFINITY)),
    "an endless verdict": (30, changed("op", 30, decided_at=INFINITY)),
    "birth of one message": (1, changed("half", 1, 1, born_at=born(1) + MICROSECOND)),
    "check of one message": (1, changed("half", 1, 1, first_check_at=born(8))),
    "decided in the future": (30, changed("op", 30, decided_at=LATE)),
    "decided before birth": (30, changed("op", 30, decided_at=born(30) - timedelta(seconds=5, microseconds=1))),
    "committed in the future": (2, changed("outbox", 2, committed_at=LATE)),
    "committed before the verdict": (2, changed("op", 2, decided_at=born(9))),
    "no verdict": (2, gone("op", 2)),
    "two verdicts": (2, twice("op", 2)),
    "two halves": (2, twice("half", 2)),
    "two messages": (2, twice("outbox", 2)),
}
WRONG: dict[str, tuple[int, Callable[[Day], None]]] = {
    "outcome": (1, changed("receipt", 1, outcome="lost")),
    "dropped": (1, changed("receipt", 1, outcome="dropped", attempts=0, status=None)),
    "status": (1, changed("receipt", 1, 1, status=302)),
    "a status below": (1, changed("receipt", 1, 1, status=-1)),
    "no status": (1, changed("receipt", 1, status=None)),
    "a broker's status": (21, changed("receipt", 21, status=500)),
    "no attempt": (2, changed("receipt", 2, attempts=0)),
    "a failed try": (2, changed("receipt", 2, attempts=2)),
    "duration": (2, changed("receipt", 2, duration_ms=3_600_001)),
    "negative duration": (2, changed("receipt", 2, duration_ms=-1)),
    "no digest": (3, changed("receipt", 3, digest=None)),
    "offset": (3, changed("receipt", 3, offset=7)),
    "sent before the commit": (4, changed("receipt", 4, first_at=born(5) - timedelta(seconds=5, microseconds=1))),
    "sent before it was due": (20, changed("receipt", 20, first_at=born(76) - MICROSECOND)),
    "settled before it was sent": (4, changed("receipt", 4, settled_at=born(6) - MICROSECOND)),
    "settled in the future": (4, changed("receipt", 4, settled_at=LATE)),
    "of a replay": (4, changed("receipt", 4, replay=1)),
    "never due": (4, changed("outbox", 4, due_at=INFINITY)),
    "never committed": (4, changed("outbox", 4, committed_at=INFINITY)),
    "never settled": (4, changed("receipt", 4, settled_at=INFINITY)),
    "never sent": (4, changed("receipt", 4, first_at=INFINITY)),
    "also dead": (4, lambda day: day.delivery("dead_letter", 4)),
    "a failed attempt": (5, lambda day: day.attempt(5, "delivery", outcome="failed")),
    "a refused attempt": (5, lambda day: day.attempt(5, "delivery", outcome="refused")),
    "no message": (5, gone("outbox", 5)),
    "two messages": (6, twice("outbox", 6)),
}


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_what_agrees_is_not_named(comparison: str) -> None:
    assert named(a_day(), comparison) == set()


@pytest.mark.parametrize("what", DIFFER)
def test_a_transaction_whose_messages_or_times_may_differ_is_named(what: str) -> None:
    number, change = DIFFER[what]
    day = a_day()
    change(day)
    assert named(day, "differing") == {OTHER_ID if what == "no UUIDv7" else id_of(number)}


@pytest.mark.parametrize("what", WRONG)
def test_a_transaction_whose_receipts_may_be_wrong_is_named(what: str) -> None:
    number, change = WRONG[what]
    day = a_day()
    change(day)
    assert named(day, "wrong_receipt") == {id_of(number)}


def test_a_message_without_a_half_is_not_compared() -> None:
    day = a_day()
    gone("half", 2)(day)
    changed("outbox", 2, key="other")(day)
    assert named(day, "differing") == set()


def test_a_check_is_no_failed_try() -> None:
    day = a_day()
    day.attempt(5, "check", outcome="unknown")
    assert named(day, "wrong_receipt") == set()
