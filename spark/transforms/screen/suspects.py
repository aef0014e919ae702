"""Find the suspect transactions of one range of ids: those whose rows are not certainly complete and in agreement.

A false suspect costs only time, because the rules judge all rows of suspects by full ids.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark.transforms.routes import RESERVED
from spark.transforms.screen.compared import Compared
from spark.transforms.screen.numbered import Flags, Ints, Numbered, codes, equal, ints
from spark.transforms.screen.subscribers import Subscriber, Takers, taking_headers

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Known:
    """What is known of a day besides its own tables. `due_by`: deliveries due by then are not in flight any more,
    microseconds. `fewest_checks`: the lowest `max_checks` of a group or of the defaults. `receipts_since`: redeliveries
    since then have left a receipt, microseconds; None: never. `named`: the ids, sorted, of transactions that are
    suspect by ledgers. `compared`: what the comparisons in Postgres know; None: the search is not for them."""

    day: date
    subscribers: Sequence[Subscriber]
    takers: Takers
    due_by: int
    fewest_checks: float
    receipts_since: int | None
    named: np.ndarray
    compared: Compared | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """`suspect`: which transactions of a range are. `untaken`: the messages in the outbox that no subscription ever
    took, Halfnote's own left out."""

    suspect: Flags
    untaken: Flags


def judge(n: Numbered, known: Known) -> Judged:
    """Judge the transactions of a range.

    A refused end, or a message that no subscription took, makes no suspect: see spark/transforms/screen/by_name.py.
    """
    transactions = len(n.ids)
    halves = np.bincount(n.message["half"], minlength=n.messages)
    sent = np.bincount(n.message["outbox"], minlength=n.messages)
    receipts = np.bincount(n.message["receipt"], minlength=n.messages)
    wrong = (halves > 1) | (sent > 1) | ((sent > 0) & (halves == 0)) | ((sent == 0) & (receipts > 0))
    misdelivered, untaken = _misdelivered(n, known, receipts > 0)
    wrong |= _differing(n) | misdelivered
    verdict = ints(n.rows["op"]["verdict"])
    commits, rollbacks = (np.bincount(n.of["op"][verdict == one], minlength=transactions) for one in (1, 2))
    messages, published = np.diff(n.first), n.count_of(sent > 0)
    unpublished = n.count_of((halves > 0) & (sent == 0))
    committed = (commits == 1) & (rollbacks == 0) & (unpublished == 0) & (published == messages)
    rolled_back = (commits == 0) & (rollbacks == 1) & (published == 0) & (unpublished == messages)
    among = np.asarray(pc.is_in(n.ids, value_set=pa.array(known.named.astype(str), pa.string())))
    return Judged(n.any_of(wrong) | ~(committed | rolled_back) | among | _asked_beyond(n, known), untaken)


def _differing(n: Numbered) -> Flags:
    """Return the messages whose digests in half, receipts and archive differ."""
    columns = {"half": "body_digest", "receipt": "digest", "archive": "body_digest"}
    columns = {table: column for table, column in columns.items() if table in n.rows}
    chunks = [chunk for table, column in columns.items() for chunk in n.rows[table][column].chunks]
    digest, values = _digests(pa.chunked_array(chunks, pa.binary()))
    message = np.concatenate([n.message[table] for table in columns])
    message, digest = message[values], digest[values]
    last = np.zeros(n.messages, np.int64)
    last[message] = digest
    differing = np.zeros(n.messages, np.bool_)
    differing[message[digest != last[message]]] = True
    return differing


def _digests(column: pa.ChunkedArray) -> tuple[Ints, Flags]:
    """Return a number for each distinct value, and where there is any value."""
    encoded = column.combine_chunks().dictionary_encode()
    return np.asarray(encoded.indices.fill_null(0)).astype(np.int64), np.asarray(encoded.indices.is_valid())


def _misdelivered(n: Numbered, known: Known, received: Flags) -> tuple[Flags, Flags]:
    """Return the messages that a subscription lacks, or has and must not have; and those that none ever took."""
    sent, judged = n.rows["outbox"], _Deliveries(n, known)
    topic, topics = codes(sent["topic"])
    own = np.array([one.startswith(RESERVED) for one in topics], np.bool_)
    wrong, taken = judged.of_unknown(), received | judged.traced
    if len(topics):
        taken[n.message["outbox"][own[topic]]] = True
    rows_of = _by_code(topic, len(topics))
    places: dict[int, list[Ints]] = {}
    for code, name in enumerate(topics):
        for place in known.takers.of(name):
            places.setdefault(place, []).append(rows_of[code])
    for place, subscriber in enumerate(known.subscribers):
        rows = np.concatenate(places[place]) if place in places else np.zeros(0, np.int64)
        judged.judge(place, subscriber, rows, wrong, taken)
    untaken = np.zeros(n.messages, np.bool_)
    untaken[n.message["outbox"]] = True
    return wrong, untaken & ~taken


def _by_code(code: Ints, values: int) -> list[Ints]:
    order = np.argsort(code, kind="stable")
    return np.split(order, np.cumsum(np.bincount(code, minlength=values))[:-1]) if values else []


class _Deliveries:
    """The receipts and messages of a range, for one subscription after the other. `traced`: the messages of which any
    delivery waits for a retry, is a dead letter or was one that a person dropped, or is over for another reason."""

    def __init__(self, n: Numbered, known: Known) -> None:
        self._n, self._due_by = n, known.due_by
        sent, receipts = n.rows["outbox"], n.rows["receipt"]
        self._offset, self._committed = ints(sent["offset"]), ints(sent["committed_at"])
        self._tag, self._tags = codes(sent["tag"])
        # A receipt of a message that is not in the outbox is wrong anyway.
        self._committed_of = np.zeros(n.messages, np.int64)
        self._committed_of[n.message["outbox"]] = self._committed
        live = ints(receipts["replay"]) == 0
        self._first_at = ints(receipts["first_at"])[live]
        self._message = n.message["receipt"][live]
        self._numbers = {one.subscription_id: place for place, one in enumerate(known.subscribers)}
        self._receipts = self._by_place(ints(receipts["subscription_id"])[live])
        self._traces, self.traced = self._evidence(known.receipts_since)
        self._got, self._may = (np.zeros(n.messages, np.bool_) for _ in range(2))
        self._headers: tuple[Ints, list[str | None]] | None = None

    def _by_place(self, subscription: Ints) -> list[Ints]:
        """Return the rows of each subscription, and those of unknown ones at the end."""
        ids, inverse = np.unique(subscription, return_inverse=True)
        place = np.array([self._numbers.get(int(one), len(self._numbers)) for one in ids], np.int64)
        return _by_code(place[inverse] if len(ids) else np.zeros(0, np.int64), len(self._numbers) + 1)

    def _evidence(self, receipts_since: int | None) -> tuple[list[Ints], Flags]:
        """Return the messages of each subscription of which one of these rows says why there may be no receipt, and all
        of these."""
        message, subscription = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for name in ("delivery_retry", "dead_letter", "redelivery"):
            rows = self._n.rows[name]
            says = ints(rows["replay"]) == 0
            if name == "redelivery" and receipts_since is not None:
                says &= equal(rows["what"], "dropped") | (ints(rows["at"]) < receipts_since)
            message.append(self._n.message[name][says])
            subscription.append(ints(rows["subscription_id"])[says])
        messages = np.concatenate(message)
        traced = np.zeros(self._n.messages, np.bool_)
        traced[messages] = True
        return [messages[rows] for rows in self._by_place(np.concatenate(subscription))], traced

    def of_unknown(self) -> Flags:
        """Return the messages that an unknown subscription got."""
        wrong = np.zeros(self._n.messages, np.bool_)
        wrong[self._message[self._receipts[-1]]] = True
        return wrong

    def judge(self, place: int, one: Subscriber, rows: Ints, wrong: Flags, taken: Flags) -> None:
        """Mark what is `wrong` for a subscription, and what it took. `rows`: of the outbox, which it takes by topic."""
        mine = self._receipts[place]
        if not len(rows) and not len(mine):
            return
        rows = rows[self._filtered(one, rows)]
        message, offset, committed = self._n.message["outbox"][rows], self._offset[rows], self._committed[rows]
        matched = offset > one.started_after
        if one.matches_until is not None:
            matched &= committed <= one.matches_until
        deleted_at = _NEVER if one.deleted_at is None else one.deleted_at
        began = matched & (committed < deleted_at) & ((committed >= one.matches_since) | (offset > one.lowest))
        taken[message[began]] = True
        got, may = self._message[mine], message[matched]
        self._got[got] = True
        if one.deleted_at is None:
            due = matched & (offset <= one.lowest) & (committed >= one.judged_from)
            lacking = message[due & (committed <= self._due_by)]
            traces = self._traces[place]
            self._got[traces] = True
            wrong[lacking[~self._got[lacking]]] = True
            self._got[traces] = False
        self._may[may] = True
        judged = (self._first_at[mine] >= one.judged_from) & (self._committed_of[got] >= one.judged_from)
        wrong[got[judged & ~self._may[got]]] = True
        self._got[got] = False
        self._may[may] = False

    def _filtered(self, one: Subscriber, rows: Ints) -> Flags:
        """Return which rows of the outbox a subscription's filters take."""
        taken = np.ones(len(rows), np.bool_)
        if one.tags is not None and self._tags:
            taken &= np.array([tag in one.tags for tag in self._tags], np.bool_)[self._tag[rows]]
        if one.headers is not None and len(rows):
            of_message, values = self._headers_of_messages()
            # Without a half the message is wrong anyway.
            wanted = np.array([*taking_headers(one.headers, values), False], np.bool_)
            taken &= wanted[of_message[self._n.message["outbox"][rows]]]
        return taken

    def _headers_of_messages(self) -> tuple[Ints, list[str | None]]:
        if self._headers is None:
            code, values = codes(self._n.rows["half"]["headers"])
            of_message = np.full(self._n.messages, len(values), np.int64)
            of_message[self._n.message["half"]] = code
            self._headers = of_message, values
        return self._headers


def _asked_beyond(n: Numbered, known: Known) -> Flags:
    """Return the transactions that may have more answered checks than their policies allow.

    Distinct numbers are counted, as the rule does, because one check may have two rows.
    """
    attempts, checks, asked = n.rows["attempt"], n.rows["check_back"], n.of["check_back"]
    answered = equal(attempts["kind"], "check") & equal(attempts["outcome"], "unknown")
    of, number = n.of["attempt"][answered], ints(attempts["number"])[answered]
    # A number has 32 bits.
    each = np.unique(of << 32 | number & 0xFFFF_FFFF)
    most = np.full(len(n.ids), known.fewest_checks)
    own = _own_limits(n)
    most[n.of["half"][~np.isnan(own)]] = own[~np.isnan(own)]
    found = np.bincount(each >> 32, minlength=len(n.ids)) > most
    found[asked[ints(checks["answered"]) > most[asked]]] = True
    return found


def _own_limits(n: Numbered) -> npt.NDArray[np.float64]:
    """Return the `max_checks` of each half's own policy; NaN without one."""
    policy, values = codes(n.rows["half"]["policy"])
    own = np.array([_max_checks(value) for value in values], np.float64)
    return own[policy]


def _max_checks(policy: str | None) -> float | None:
    try:
        found: Mapping[str, object] | None = None if policy is None else json.loads(policy)
    except ValueError:
        return None
    own = found.get("max_checks") if isinstance(found, dict) else None
    if not isinstance(own, int | float) or isinstance(own, bool):
        return None
    try:
        return float(own)
    except OverflowError:
        # JSON has no largest integer.
        return math.inf if own > 0 else -math.inf
