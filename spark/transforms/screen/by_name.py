"""Counts in a range of ids what two rules report by name: refused ends by producer group, untaken messages by topic.

A million of them are a few findings. So a transaction that is otherwise in order is not joined for them: the rules add
these counts to what they find among the suspects.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from spark.schemas import REFUSED, UNTAKEN
from spark.transforms.finding import NAMED
from spark.transforms.screen.numbered import Ints, Numbered, codes, equal, ints
from spark.transforms.screen.row_groups import arrow_schema
from spark.transforms.screen.suspects import Judged


def refused(n: Numbered, judged: Judged) -> pa.Table:
    """Return the refused ends of transactions that are not suspect, by group (REFUSED)."""
    of = n.of["attempt"][equal(n.rows["attempt"]["kind"], "refused")]
    of = of[~judged.suspect[of]]
    half, groups = codes(n.rows["half"]["producer_group"])
    # A transaction that is not suspect has one half at position 0.
    first = ints(n.rows["half"]["position"]) == 0
    group_of = np.zeros(len(n.ids), np.int64)
    group_of[n.of["half"][first]] = half[first]
    ended = group_of[of]
    of = of[np.argsort(ended, kind="stable")]
    rows = [
        {"producer_group": groups[code], "refused": count, "transactions": _first_ids(n, of[first : first + count])}
        for code, first, count in _runs(ended)
    ]
    return _table(rows, REFUSED)


def untaken(n: Numbered, judged: Judged) -> pa.Table:
    """Return the untaken messages of transactions that are not suspect, by topic (UNTAKEN)."""
    sent = n.rows["outbox"]
    rows = np.flatnonzero(judged.untaken[n.message["outbox"]] & ~judged.suspect[n.of["outbox"]])
    topic, topics = codes(sent["topic"].take(pa.array(rows)))
    offset, position = ints(sent["offset"])[rows], ints(sent["position"])[rows]
    # By topic, and of each topic the lowest offset first.
    order = np.lexsort((offset, topic))
    found = []
    for code, place, count in _runs(topic):
        first = order[place]
        message = f"{n.ids[n.of['outbox'][rows[first]]]}-{position[first]}"
        found.append({"topic": topics[code], "messages": count, "first": message, "offset": int(offset[first])})
    return _table(found, UNTAKEN)


def _runs(names: Ints) -> Iterable[tuple[int, int, int]]:
    """Return each code that occurs, where its rows begin once they are sorted by code, and their number.

    A day may have thousands of names, so the rows are not compared with each.
    """
    found, counts = np.unique(names, return_counts=True)
    return zip(found.tolist(), (np.cumsum(counts) - counts).tolist(), counts.tolist(), strict=True)


def _first_ids(n: Numbered, transactions: Ints) -> list[str]:
    ids = n.ids.take(pa.array(np.unique(transactions)))
    first: list[str] = ids.take(pc.bottom_k_unstable(ids, NAMED)).to_pylist()
    return first


def _table(rows: Sequence[Mapping[str, Any]], schema: StructType) -> pa.Table:
    return pa.Table.from_pylist(list(rows), arrow_schema(schema))
