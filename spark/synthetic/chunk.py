"""One part of a day as Arrow tables, with the names and columns of Postgres."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark.synthetic.attempts import KINDS, OUTCOMES, PARKED_REASON, Attempts, dead, generate_attempts
from spark.synthetic.columns import NONE, Ints, binaries, id_texts, numbers, times, words
from spark.synthetic.deliveries import DROPPED, FIRST, REDELIVERED, RETRIED, TRIES, Deliveries, generate_deliveries
from spark.synthetic.faults import Planted, plant
from spark.synthetic.half_digests import half_digests
from spark.synthetic.ledgers import ledgers
from spark.synthetic.messages import HEADERS, TAGS, Messages, bodies, digests, generate_messages
from spark.synthetic.plan import GROUPS, INTERVAL_S, MAX_CHECKS, OWN_GROUP, Plan
from spark.synthetic.transactions import IMMUNITY_US, POLICIES, Transactions, generate_transactions

_HOUR_US = 3_600_000_000
_SHORT, _INT, _LONG = pa.int16(), pa.int32(), pa.int64()


@dataclass
class Chunk:
    """A part of a day: rows by table, planted subjects by kind, and rows by ledger if ledgers are requested."""

    tables: dict[str, pa.Table]
    planted: dict[str, list[str]]
    ledgers: dict[str, pa.Table]


def chunk_of(plan: Plan, chunk: int) -> Chunk:
    """Make a part of a day; the same plan and number always make the same rows. Raises TooFewError."""
    rng = np.random.default_rng([plan.seed, plan.day.toordinal(), chunk, 0])
    transactions = generate_transactions(plan, chunk, rng)
    messages = generate_messages(plan, chunk, transactions, rng)
    deliveries = generate_deliveries(plan, messages, rng)
    planted = plant(plan, chunk, transactions, messages, deliveries)
    attempts = generate_attempts(plan, transactions, messages, deliveries, planted)
    rows = _Rows(plan, chunk, transactions, messages, deliveries, attempts, planted)
    said = {} if plan.ledgers is None else ledgers(plan, transactions, messages, deliveries, planted)
    return Chunk(rows.tables(), planted.subjects, said)


@dataclass
class _Rows:
    """The generated columns from which the tables of a chunk are built."""

    plan: Plan
    chunk: int
    transactions: Transactions
    messages: Messages
    deliveries: Deliveries
    attempts: Attempts
    planted: Planted

    def tables(self) -> dict[str, pa.Table]:
        """Return the rows by table."""
        self.ids = id_texts(self.transactions.ids)
        self.subscriptions = np.array(self.plan.ids)
        # Negative places are rows that faults added.
        groups = [*GROUPS, OWN_GROUP, *self.planted.groups]
        code = np.where(self.transactions.group < 0, len(GROUPS) - self.transactions.group, self.transactions.group)
        self.groups = words(code, groups)
        self.bodies = bodies(self.messages)
        self.digests = digests(self.bodies)
        return {
            "half": self._half(),
            "op": self._op(),
            "outbox": self._outbox(),
            "receipt": self._receipt(),
            "attempt": self._attempt(),
            "check_back": self._check_back(),
            "dead_letter": self._dead_letter(),
            "redelivery": self._redelivery(),
        }

    def _half(self) -> pa.Table:
        messages, transactions = self.messages, self.transactions
        at = np.flatnonzero(transactions.has_half[messages.of])
        of, first = messages.of[at], messages.position[at] == 0
        half = pa.table(
            {
                "transaction_id": self.ids.take(pa.array(of)),
                "position": numbers(messages.position[at], _SHORT),
                "producer_group": self.groups.take(pa.array(of)),
                "topic": words(messages.topic[at], messages.topics),
                "key": _keys(messages.key[at]),
                "tag": words(messages.tag[at], TAGS),
                "headers": words(messages.headers[at], HEADERS),
                "content_type": words(np.zeros(len(at), dtype=np.int64), ["application/json"]),
                "body": pa.array(self.bodies, pa.string()).take(pa.array(at)),
                "body_digest": binaries(self.digests[at]),
                "deliver_after_s": pa.array(messages.delay_s[at], mask=np.isnan(messages.delay_s[at])),
                "born_at": times(transactions.born[of]),
                "first_check_at": times(transactions.born[of] + IMMUNITY_US),
                "policy": words(np.where(first, transactions.own_policy[of], NONE), POLICIES),
            }
        )
        return half.append_column("digest", half_digests(half))

    def _op(self) -> pa.Table:
        transactions = self.transactions
        at = np.flatnonzero(transactions.has_op)
        return pa.table(
            {
                "transaction_id": self.ids.take(pa.array(at)),
                "verdict": numbers(transactions.verdict[at], _SHORT),
                "source": numbers(transactions.source[at], _SHORT),
                "actor": pa.nulls(len(at), pa.string()),
                "reason": pa.nulls(len(at), pa.string()),
                "decided_at": times(transactions.decided[at]),
            }
        )

    def _outbox(self) -> pa.Table:
        messages = self.messages
        doubled = np.array([place for place, _ in self.planted.doubled], dtype=np.int64)
        at = np.concatenate([np.flatnonzero(messages.published), doubled])
        offset, committed = messages.offset[at], messages.committed[at]
        if len(doubled):
            offset[-len(doubled) :] = [offset for _, offset in self.planted.doubled]
            committed[-len(doubled) :] = messages.committed.max()
        return pa.table(
            {
                "transaction_id": self.ids.take(pa.array(messages.of[at])),
                "position": numbers(messages.position[at], _SHORT),
                "offset": numbers(offset, _LONG),
                "topic": words(messages.topic[at], messages.topics),
                "key": _keys(messages.key[at]),
                "tag": words(messages.tag[at], TAGS),
                "due_at": times(messages.due[at]),
                "committed_at": times(committed),
            }
        )

    def _receipt(self) -> pa.Table:
        messages, deliveries, extra = self.messages, self.deliveries, self.planted.received
        kept = np.flatnonzero(deliveries.received)
        more = [np.array([row[n] for row in extra], dtype=np.int64) for n in range(3)]
        at, to = np.concatenate([deliveries.of[kept], more[0]]), np.concatenate([deliveries.to[kept], more[1]])
        dropped = _padded(deliveries.outcome[kept], len(extra), FIRST) == DROPPED
        begun = np.concatenate([deliveries.first_at[kept], self.transactions.decided[messages.of[more[0]]] + 1_000_000])
        took_ms = _padded(deliveries.duration_ms[kept], len(extra), 5)
        by_person = np.isin(deliveries.outcome[kept], (DROPPED, REDELIVERED))
        over = _padded(deliveries.over[kept] - deliveries.first_at[kept] + by_person * _HOUR_US, len(extra), 0)
        digest = self.digests[at]
        wrong = np.flatnonzero(deliveries.wrong[kept])
        digest[wrong] ^= 0xFF
        return pa.table(
            {
                "transaction_id": self.ids.take(pa.array(messages.of[at])),
                "position": numbers(messages.position[at], _SHORT),
                "subscription_id": numbers(self.subscriptions[to], _INT),
                "offset": numbers(np.concatenate([messages.offset[deliveries.of[kept]], more[2]]), _LONG),
                "outcome": words(dropped.astype(np.int64), ["delivered", "dropped"]),
                "attempts": numbers(_padded(_tries(deliveries)[kept], len(extra), 1), _INT),
                "first_at": times(begun),
                "duration_ms": numbers(np.where(dropped, 0, took_ms), _INT),
                "status": numbers(np.where(dropped, 503, 204), _INT),
                "digest": binaries(digest, dropped),
                "settled_at": times(begun + over + took_ms * 1000),
                "replay": numbers(_padded(deliveries.replay[kept], len(extra), 0), _INT),
            }
        )

    def _attempt(self) -> pa.Table:
        attempts = self.attempts
        first = self.plan.first_attempt + self.chunk * self.plan.attempts
        to = np.where(attempts.to == NONE, NONE, self.subscriptions[np.where(attempts.to == NONE, 0, attempts.to)])
        return pa.table(
            {
                "transaction_id": self.ids.take(pa.array(attempts.of)),
                "attempt_id": numbers(first + np.arange(len(attempts.of)), _LONG),
                "kind": words(attempts.kind, KINDS),
                "at": times(attempts.at),
                "number": numbers(attempts.number, _INT),
                "outcome": words(attempts.outcome, OUTCOMES),
                "position": numbers(attempts.position, _SHORT),
                "subscription_id": numbers(to, _INT),
                "verdict": numbers(attempts.verdict, _SHORT),
                "source": numbers(attempts.source, _SHORT),
                "status": numbers(attempts.status, _INT),
                "duration_ms": numbers(attempts.duration_ms, _INT),
                "replay": numbers(np.full(len(attempts.of), NONE), _INT),
            }
        )

    def _check_back(self) -> pa.Table:
        at = np.array(self.planted.parked, dtype=np.int64)
        swept = self.transactions.born[at] + IMMUNITY_US
        asked = numbers(np.full(len(at), MAX_CHECKS), _INT)
        return pa.table(
            {
                "transaction_id": self.ids.take(pa.array(at)),
                "producer_group": self.groups.take(pa.array(at)),
                "state": numbers(np.full(len(at), 2), _SHORT),
                "swept_at": times(swept),
                "asked": asked,
                "answered": asked,
                "unanswered": numbers(np.zeros(len(at), dtype=np.int64), _INT),
                "unanswered_since": times(np.full(len(at), NONE)),
                "next_check_at": times(np.full(len(at), NONE)),
                "parked_at": times(swept + MAX_CHECKS * INTERVAL_S * 1_000_000),
                "parked_reason": words(np.zeros(len(at), dtype=np.int64), [PARKED_REASON]),
            }
        )

    def _dead_letter(self) -> pa.Table:
        messages, deliveries = self.messages, self.deliveries
        rows = dead(deliveries)
        at = deliveries.of[rows]
        return pa.table(
            self._delivery(rows)
            | {
                "offset": numbers(messages.offset[at], _LONG),
                "topic": words(messages.topic[at], messages.topics),
                "key": _keys(messages.key[at]),
                "attempts": numbers(np.full(len(at), TRIES), _INT),
                "first_at": times(deliveries.first_at[rows]),
                "reason": words(np.zeros(len(at), dtype=np.int64), ["retries_exhausted"]),
                "died_at": times(deliveries.over[rows]),
            }
        )

    def _redelivery(self) -> pa.Table:
        rows = np.flatnonzero(self.deliveries.kept & np.isin(self.deliveries.outcome, (DROPPED, REDELIVERED)))
        dropped = self.deliveries.outcome[rows] == DROPPED
        return pa.table(
            self._delivery(rows)
            | {
                "offset": numbers(self.messages.offset[self.deliveries.of[rows]], _LONG),
                "what": words(dropped.astype(np.int64), ["redelivered", "dropped"]),
                "at": times(self.deliveries.over[rows] + _HOUR_US),
                "died_at": times(self.deliveries.over[rows]),
                "died_because": words(np.zeros(len(rows), dtype=np.int64), ["retries_exhausted"]),
                "attempts": numbers(np.full(len(rows), TRIES), _INT),
            }
        )

    def _delivery(self, rows: Ints) -> dict[str, pa.Array]:
        at = self.deliveries.of[rows]
        return {
            "subscription_id": numbers(self.subscriptions[self.deliveries.to[rows]], _INT),
            "replay": numbers(self.deliveries.replay[rows], _INT),
            "transaction_id": self.ids.take(pa.array(self.messages.of[at])),
            "position": numbers(self.messages.position[at], _SHORT),
        }


def _tries(deliveries: Deliveries) -> Ints:
    """Return the number of attempts in a receipt, which does not count attempts before a redelivery."""
    return np.select([deliveries.outcome == RETRIED, deliveries.outcome == DROPPED], [deliveries.failed + 1, TRIES], 1)


def _padded(values: Ints, more: int, value: int) -> Ints:
    return np.concatenate([values, np.full(more, value, dtype=values.dtype)])


def _keys(codes: Ints) -> pa.Array:
    """Return the keys for codes; NONE is null."""
    return pc.binary_join_element_wise("customer", numbers(codes, _LONG).cast(pa.string()), "-")
