"""Digests of generated half messages, as the service computes them."""

from itertools import groupby
from operator import attrgetter

import pyarrow as pa

from spark.half_digest import StoredMessage, digest_of
from spark.synthetic.plan import OWN_GROUP


def half_digests(half: pa.Table) -> pa.Array:
    """Return the column `digest` for rows of `half` without it, in which a transaction's rows are adjacent."""
    missing = [None] * half.num_rows
    known = set(half.column_names)
    columns = [half[name].to_pylist() if name in known else missing for name in StoredMessage._fields]
    digests: list[bytes | None] = []
    for _, group in groupby(map(StoredMessage._make, zip(*columns, strict=True)), key=attrgetter("transaction_id")):
        messages = list(group)
        first = messages[0]
        digests.append(first.body_digest if first.producer_group == OWN_GROUP else digest_of(messages))
        digests += [None] * (len(messages) - 1)
    return pa.array(digests, pa.binary())
