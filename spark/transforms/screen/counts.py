"""Counts one range of ids for the figures: what spark/transforms/figures.py counts in a day that Spark reads."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.transforms.day_counts import MOST_ATTEMPTS, MOST_CHECKS, DayCounts
from spark.transforms.joined import PARKED
from spark.transforms.outcomes import FROM_MS, QUARTERS
from spark.transforms.routes import RESERVED
from spark.transforms.screen.numbered import Flags, Ints, Numbered, codes, equal, ints

_FROM_US = np.array([ms * 1000 for ms in FROM_MS])
_QUARTER_US = 900_000_000
_COMMITTED, _ROLLED_BACK = 1, 2


def counts_of(n: Numbered, day: date) -> DayCounts:
    """Return the counts of a range."""
    settled, latencies = _deliveries(n)
    sent, first = n.rows["outbox"], n.rows["half"].filter(pa.array(ints(n.rows["half"]["position"]) == 0))
    return DayCounts(
        outcomes=_outcomes(n, day),
        settled=settled,
        latencies=latencies,
        checks=_checks(n),
        topics=_named(sent["topic"], ~_reserved(sent["topic"])),
        groups=_named(first["producer_group"], ~_reserved(first["topic"])),
    )


def _outcomes(n: Numbered, day: date) -> Counter[tuple[int, str, int | None, int | None]]:
    """Sum the values of a transaction's rows as spark/transforms/outcomes.py does."""
    transactions, half, op = len(n.ids), n.rows["half"], n.rows["op"]
    first = ints(half["position"]) == 0
    of, born_at = n.of["half"][first], ints(half["born_at"])[first]
    midnight = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()) * 1_000_000
    quarter, verdict, source, micros = (np.zeros(transactions, np.int64) for _ in range(4))
    np.bitwise_or.at(quarter, of, np.clip((born_at - midnight) // _QUARTER_US, 0, QUARTERS - 1))
    np.bitwise_or.at(verdict, n.of["op"], ints(op["verdict"]))
    np.bitwise_or.at(source, n.of["op"], ints(op["source"]))
    np.add.at(micros, n.of["op"], ints(op["decided_at"]))
    np.subtract.at(micros, of, born_at)
    born, waits = (np.zeros(transactions, np.bool_) for _ in range(2))
    born[of] = True
    waits[n.of["check_back"][ints(n.rows["check_back"]["state"]) == PARKED]] = True
    names = ("committed", "rolled_back", "parked", "undecided")
    outcome = np.select([verdict == _COMMITTED, verdict == _ROLLED_BACK, waits], [0, 1, 2], 3)
    decided = verdict > 0
    columns = (quarter, outcome, np.where(decided, source, -1), np.where(decided, bucket_of(micros), -1))
    found = _counted([column[born] for column in columns])
    return Counter(
        {
            (at, names[which], None if by < 0 else by, None if took < 0 else took): count
            for (at, which, by, took), count in found
        }
    )


def bucket_of(micros: Ints) -> Ints:
    """Return the places in FROM_MS of durations in microseconds."""
    return np.maximum(np.searchsorted(_FROM_US, micros, side="right") - 1, 0)


def _deliveries(n: Numbered) -> tuple[Counter[tuple[int, str, int]], Counter[tuple[int, int]]]:
    receipts, sent = n.rows["receipt"], n.rows["outbox"]
    live = ints(receipts["replay"]) == 0
    delivered, dropped = (live & equal(receipts["outcome"], name) for name in ("delivered", "dropped"))
    subscription, attempts = ints(receipts["subscription_id"]), np.clip(ints(receipts["attempts"]), 1, MOST_ATTEMPTS)
    settled = Counter[tuple[int, str, int]]()
    for name, which in (("delivered", delivered), ("dropped", dropped)):
        for (one, tries), count in _counted([subscription[which], attempts[which]]):
            settled[one, name, tries] = count
    due_from, there = np.zeros(n.messages, np.int64), np.zeros(n.messages, np.bool_)
    due_from[n.message["outbox"]] = ints(pc.coalesce(sent["due_at"], sent["committed_at"]))
    there[n.message["outbox"]] = True
    known = delivered & there[n.message["receipt"]]
    took = ints(receipts["settled_at"])[known] - due_from[n.message["receipt"][known]]
    latencies = {(one, place): count for (one, place), count in _counted([subscription[known], bucket_of(took)])}
    return settled, Counter(latencies)


def _checks(n: Numbered) -> Counter[int]:
    """Count by the highest number, because a check that `/end` answered has two attempts."""
    attempts, which = n.rows["attempt"], equal(n.rows["attempt"]["kind"], "check")
    highest = np.zeros(len(n.ids), np.int64)
    np.maximum.at(highest, n.of["attempt"][which], ints(attempts["number"])[which])
    return Counter({number: count for (number,), count in _counted([np.minimum(highest[highest > 0], MOST_CHECKS)])})


def _reserved(topic: pa.ChunkedArray) -> Flags:
    return np.asarray(pc.starts_with(topic, RESERVED), dtype=np.bool_)


def _named(names: pa.ChunkedArray, which: Flags) -> Counter[str]:
    code, values = codes(names)
    counts: list[int] = np.bincount(code[which], minlength=len(values)).tolist()
    return Counter({name: count for name, count in zip(values, counts, strict=True) if count})


def _counted(columns: Sequence[Ints]) -> Iterable[tuple[tuple[int, ...], int]]:
    """Return each distinct row of the columns, and how often it occurs. The product of the columns' spans of values
    must be small enough for a number: they are quarters, buckets, small counts and subscriptions."""
    if not len(columns[0]):
        return []
    lows = [int(column.min()) for column in columns]
    spans = [int(column.max()) - low + 1 for column, low in zip(columns, lows, strict=True)]
    code = np.zeros(len(columns[0]), np.int64)
    for column, low, span in zip(columns, lows, spans, strict=True):
        code = code * span + (column - low)
    values, counts = np.unique(code, return_counts=True)
    rows = np.stack(np.unravel_index(values, spans), axis=1) + np.array(lows)
    return zip(map(tuple, rows.tolist()), counts.tolist(), strict=True)
