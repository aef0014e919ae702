"""Finds, in a range of ids, the transactions that the comparisons in Postgres must look at.

Postgres compares messages with halves (spark/sources/published.py), and receipts with messages and attempts
(received.py). Nearly all agree, and arrays show that in a fraction of the time. A transaction that is left out here is
one in which these statements find nothing, so a condition that is added there is added here too. A transaction that is
named without need costs only time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Event

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.transforms.screen.numbered import Flags, Ints, Numbered, equal, ints

_SECOND = 1_000_000
# Of the time of an id, the statement computes with fractions.
_ROUNDED = _SECOND
_ID_CHARACTERS = 36
_VERSION_AT, _VARIANT_AT = 14, 19
# The first 48 bits are milliseconds.
_TIME_AT = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12)


@dataclass(frozen=True)
class Compared:
    """What the statements know besides the rows: the snapshot's time; how far clocks may differ, seconds; how far the
    time of an id and the clock may differ, seconds, or None if it is not judged; the longest immunity of a half from
    checks, hours, and the longest time of a delivery, milliseconds; and the subscriptions, not deleted, that are
    webhooks, whose receipts have a status. `ended`: set when the comparisons are not needed any more."""

    seen_at: datetime
    clocks_differ_s: float
    ids_differ_s: float | None
    longest_immunity_h: int
    longest_ms: int
    webhooks: frozenset[int]
    ended: Event


def differing(n: Numbered, by: Compared) -> Flags:
    """Return the transactions in which a message may differ from its half, or times may disagree."""
    half, sent, op = n.rows["half"], n.rows["outbox"], n.rows["op"]
    skew, late = int(by.clocks_differ_s * _SECOND), _latest(by)
    row = np.full(n.messages, -1, np.int64)
    row[n.message["half"]] = np.arange(len(half))
    born, committed = ints(half["born_at"]), ints(sent["committed_at"])
    first_check, decided = ints(half["first_check_at"]), ints(op["decided_at"])

    own = row[n.message["outbox"]]
    has_half = own >= 0
    kept = pa.array(np.maximum(own, 0))
    wrong_sent = committed > late
    if len(half):
        for name in ("topic", "key", "tag"):
            wrong_sent |= ~_same(sent[name], half[name].take(kept))
        wrong_sent |= ~_is_due(sent["due_at"], committed, half["deliver_after_s"].take(kept))
    verdict = _of_first(n.of["op"], decided, len(n.ids))
    wrong_sent |= committed < verdict[n.of["outbox"]] - skew
    wrong_sent |= ~_as_first(n, "outbox", committed)

    wrong_half = (born > late) | (first_check < born) | (first_check - born > by.longest_immunity_h * 3600 * _SECOND)
    wrong_half |= ~_as_first(n, "half", born) | ~_as_first(n, "half", first_check)
    if by.ids_differ_s is not None:
        of_id = _times_of(n.ids)[n.of["half"]]
        wrong_half |= np.abs(born - of_id) > int(by.ids_differ_s * _SECOND) - _ROUNDED
    wrong_op = decided > late
    birth = _of_first(n.of["half"], born, len(n.ids))
    wrong_op |= decided < birth[n.of["op"]] - skew

    verdicts = np.bincount(n.of["op"], minlength=len(n.ids))
    found = _repeated(n) | (verdicts > 1)
    for table, names in (("half", ("born_at", "first_check_at")), ("outbox", ("committed_at", "due_at"))):
        found[n.of[table][_odd_times(n.rows[table], names)]] = True
    found[n.of["op"][_odd_times(op, ("decided_at",))]] = True
    # A message without a half is not compared. One without a verdict has no time to be compared with.
    found[n.of["outbox"][has_half & (wrong_sent | (verdicts[n.of["outbox"]] == 0))]] = True
    found[n.of["half"][wrong_half]] = True
    found[n.of["op"][wrong_op]] = True
    return found


def wrong_receipts(n: Numbered, by: Compared) -> Flags:
    """Return the transactions in which the relay may not have written a receipt: all with failed tries, dead letters,
    drops and replays are among them."""
    got, sent, tried = n.rows["receipt"], n.rows["outbox"], n.rows["attempt"]
    skew, late = int(by.clocks_differ_s * _SECOND), _latest(by)
    committed = ints(sent["committed_at"])
    offset, due = (np.full(n.messages, -1, np.int64) for _ in range(2))
    offset[n.message["outbox"]] = ints(sent["offset"])
    due[n.message["outbox"]] = np.maximum(committed, ints(sent["due_at"], missing=np.iinfo(np.int64).min))
    message, status = n.message["receipt"], ints(got["status"], missing=-1)
    first_at, settled_at, took = ints(got["first_at"]), ints(got["settled_at"]), ints(got["duration_ms"])
    without = ~np.isin(ints(got["subscription_id"]), np.array(sorted(by.webhooks), np.int64))
    plain = equal(got["outcome"], "delivered") & (ints(got["attempts"]) == 1) & (ints(got["replay"]) == 0)
    plain &= (status >= 200) & (status <= 299) | (status == -1) & _is_null(got["status"]) & without
    plain &= (took >= 0) & (took <= by.longest_ms) & ~_is_null(got["digest"])
    plain &= (offset[message] == ints(got["offset"])) & (first_at >= due[message] - skew)
    plain &= (settled_at >= first_at) & (settled_at <= late)

    found = _repeated(n)
    found[n.of["outbox"][_odd_times(sent, ("committed_at", "due_at"))]] = True
    plain &= ~_odd_times(got, ("first_at", "settled_at"))
    found[n.of["receipt"][~plain]] = True
    failed = equal(tried["kind"], "delivery") & (equal(tried["outcome"], "failed") | equal(tried["outcome"], "refused"))
    found[n.of["attempt"][failed]] = True
    found[n.of["dead_letter"]] = True
    return found


# By the names of the comparisons.
COMPARISONS: Mapping[str, Callable[[Numbered, Compared], Flags]] = {
    "differing": differing,
    "wrong_receipt": wrong_receipts,
}


def _latest(by: Compared) -> int:
    """Return the time, in microseconds, after which a time is in the future."""
    seen_at = (by.seen_at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    return seen_at + int(by.clocks_differ_s * _SECOND)


def _odd_times(table: pa.Table, names: Sequence[str]) -> Flags:
    """Return the rows with a time before 1970 in one of the columns. The driver reads `infinity`, and a time that 64
    bits cannot hold, as such a time."""
    odd: Flags = np.any([ints(table[name]) < 0 for name in names], axis=0)
    return odd


def _repeated(n: Numbered) -> Flags:
    """Return the transactions of which a half or a message is there twice."""
    return n.any_of(
        (np.bincount(n.message["half"], minlength=n.messages) > 1)
        | (np.bincount(n.message["outbox"], minlength=n.messages) > 1)
    )


def _same(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Flags:
    """Return where two columns have the same value, or both null."""
    equals: Flags = np.asarray(pc.fill_null(pc.equal(one, other), False), dtype=np.bool_)
    return equals | _is_null(one) & _is_null(other)


def _is_null(column: pa.ChunkedArray) -> Flags:
    return np.asarray(pc.is_null(column), dtype=np.bool_)


def _is_due(due_at: pa.ChunkedArray, committed: Ints, delay: pa.ChunkedArray) -> Flags:
    """Return where the due time is the commit and the delay, or both are null; false where this is not certain."""
    without = _is_null(due_at) & _is_null(delay)
    seconds = np.asarray(pc.fill_null(delay, -1.0).to_numpy(), dtype=np.float64)
    # Postgres rounds fractions.
    whole = (seconds >= 0) & (seconds < 1e9) & (seconds == np.floor(seconds))
    after = np.where(whole, seconds, 0).astype(np.int64) * _SECOND
    due: Flags = whole & ~_is_null(due_at) & (ints(due_at) == committed + after)
    return without | due


def _of_first(of: Ints, values: Ints, transactions: int) -> Ints:
    """Return a value of each transaction, from any of its rows; without a row, the least number."""
    found = np.full(transactions, np.iinfo(np.int64).min // 2, np.int64)
    found[of] = values
    return found


def _as_first(n: Numbered, table: str, values: Ints) -> Flags:
    """Return the rows with the value of the first message of their transaction; false where that has no row."""
    of_message = np.full(n.messages, np.iinfo(np.int64).min, np.int64)
    of_message[n.message[table]] = values
    return np.asarray(of_message[n.first[n.of[table]]] == values)


def _times_of(ids: pa.Array) -> Ints:
    """Return the times of ids in microseconds; the least number for an id that is no UUIDv7."""
    found = np.full(len(ids), np.iinfo(np.int64).min // 2, np.int64)
    if not len(ids) or pc.any(pc.not_equal(pc.binary_length(ids), _ID_CHARACTERS)).as_py():
        return found
    ids = pa.concat_arrays([ids.cast(pa.string())])
    offsets = np.frombuffer(ids.buffers()[1], np.int32, count=len(ids) + 1, offset=ids.offset * 4)
    text = np.frombuffer(ids.buffers()[2], np.uint8)[offsets[0] : offsets[-1]].reshape(len(ids), _ID_CHARACTERS)
    value = np.zeros(256, np.int64)
    for digit in range(16):
        value[ord(f"{digit:x}")] = digit
    millis = np.zeros(len(ids), np.int64)
    for place in _TIME_AT:
        millis = millis << 4 | value[text[:, place]]
    known = (text[:, _VERSION_AT] == ord("7")) & np.isin(text[:, _VARIANT_AT], np.frombuffer(b"89ab", np.uint8))
    return np.where(known, millis * 1000, found)
