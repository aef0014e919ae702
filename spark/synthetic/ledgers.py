"""Generate the ledgers of producers and consumers for a chunk, with separate faults.

The ledgers agree with the tables, including the faults of the tables. So a ledger's fault causes one finding of its
kind and none of another kind.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark.synthetic.columns import Ints, id_texts
from spark.synthetic.deliveries import DROPPED, Deliveries
from spark.synthetic.faults import Planted
from spark.synthetic.messages import Messages
from spark.synthetic.plan import Plan
from spark.synthetic.transactions import Transactions

VERDICTS = np.array(["", "commit", "rollback"])


def ledgers(
    plan: Plan, transactions: Transactions, messages: Messages, deliveries: Deliveries, planted: Planted
) -> dict[str, pa.Table]:
    """Return the rows by ledger, `producer` and `consumer`, in the columns of docs/ledgers.md."""
    return {
        "producer": _producer(transactions, planted),
        "consumer": _consumer(plan, transactions, messages, deliveries, planted),
    }


def write(directory: Path, chunk: int, tables: dict[str, pa.Table]) -> None:
    """Write a chunk's rows below a directory. Raises OSError."""
    for name, rows in tables.items():
        place = directory / name / f"part-{chunk:05}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, place, compression="zstd")


def _producer(transactions: Transactions, planted: Planted) -> pa.Table:
    verdict = np.where(transactions.has_op, transactions.verdict, 0)
    verdict[planted.disagreeing] = 3 - verdict[planted.disagreeing]
    verdict[planted.unsent] = 1
    at = np.flatnonzero(verdict)
    ids = id_texts(transactions.ids).take(pa.array(at))
    return pa.table({"transaction_id": ids, "verdict": pa.array(VERDICTS[verdict[at]])})


def _consumer(
    plan: Plan, transactions: Transactions, messages: Messages, deliveries: Deliveries, planted: Planted
) -> pa.Table:
    # A consumer recognizes a message of a replay by its id and does not process it again.
    seen = (
        deliveries.received
        & (deliveries.outcome != DROPPED)
        & (deliveries.replay == 0)
        & messages.published[deliveries.of]
    )
    seen &= ~np.isin(deliveries.of, planted.unconsumed)
    more = [(place, to) for place, to, _ in planted.received if messages.published[place]]
    # No subscription received these messages.
    more += [(place, 0) for place in planted.consumed_unsent]
    of = np.concatenate([deliveries.of[seen], np.array([place for place, _ in more], dtype=np.int64)])
    to = np.concatenate([deliveries.to[seen], np.array([number for _, number in more], dtype=np.int64)])
    names = [subscription.name for subscription in plan.subscriptions()]
    return pa.table(
        {
            "message_id": _message_ids(transactions, messages, of),
            "times_seen": pa.array(1 + np.isin(of, planted.twice).astype(np.int64)),
            "subscription": pa.array(np.array(names)[to]),
        }
    )


def _message_ids(transactions: Transactions, messages: Messages, places: Ints) -> pa.Array:
    ids = id_texts(transactions.ids).take(pa.array(messages.of[places])).to_pylist()
    return pa.array(
        [f"{one}-{position}" for one, position in zip(ids, messages.position[places], strict=True)], pa.string()
    )
