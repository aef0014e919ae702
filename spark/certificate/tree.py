"""The digest tree of a certified day.

A leaf is the SHA-256 of a row's text. Leaves of ids with the same first 8 hex digits (65.5 seconds) make a node, nodes
with the same first 7 digits (17.5 minutes) a bucket, buckets a table, and tables the root. A node is the SHA-256 over
the sorted digests below it. To change a row unnoticed, a forger must find a collision of SHA-256; with a sum or an
exclusive or of digests, a set of rows with the same result can be computed. Each level begins with a byte of its own
(RFC 9162 does the same), so that a node is never taken for a leaf.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from itertools import groupby
from typing import Any, NamedTuple

# Columns of a row's text, in order, by kind. `id` and `json` columns hold text.
Columns = tuple[tuple[str, str], ...]


def _columns(words: str) -> Columns:
    """Parse `name:kind name:kind …`."""
    return tuple((name, kind) for name, _, kind in (word.partition(":") for word in words.split()))


_FIRST: dict[str, Columns] = {
    "half": _columns(
        "transaction_id:text position:int producer_group:text topic:text tag:text headers:text body_digest:bytes "
        "digest:bytes born_at:time first_check_at:time policy:text"
    ),
    "op": _columns("transaction_id:text verdict:int source:int decided_at:time"),
    "outbox": _columns("transaction_id:text position:int offset:int topic:text tag:text due_at:time committed_at:time"),
    "receipt": _columns(
        "transaction_id:text position:int subscription_id:int offset:int outcome:text attempts:int first_at:time "
        "digest:bytes settled_at:time replay:int"
    ),
}
# By the number of the format: a certificate is verified by the columns of its own.
COLUMNS_OF: dict[int, dict[str, Columns]] = {
    1: _FIRST,
    2: _FIRST
    | {
        "op": _columns("transaction_id:text verdict:int source:int actor:text reason:text decided_at:time"),
        "outbox": _columns(
            "transaction_id:text position:int offset:int topic:text key:text tag:text due_at:time committed_at:time"
        ),
    },
}
COLUMNS_OF[3] = COLUMNS_OF[2] | {
    "receipt": _columns(
        "transaction_id:text position:int subscription_id:int offset:int outcome:text attempts:int first_at:time "
        "duration_ms:int status:int digest:bytes settled_at:time replay:int"
    ),
}
FORMAT = max(COLUMNS_OF)
COLUMNS = COLUMNS_OF[FORMAT]
FINDINGS: Columns = _columns(
    "kind:text subject:text transaction_id:text position:int subscription_id:int producer_group:text detail:text"
)
FINDING = "finding"
NULL = "~"
LEAF, NODE, BUCKET, TABLE, ROOT = "\x00", "\x01", "\x02", "\x03", "\x04"
NODE_DIGITS, BUCKET_DIGITS = 8, 7
# A bucket of ids in milliseconds, because an id begins with 12 hex digits of these.
BUCKET_MS = 1 << 4 * (12 - BUCKET_DIGITS)


class Bucket(NamedTuple):
    """The number of rows below a node of the tree, and its digest in hex."""

    rows: int
    digest: str


Buckets = Mapping[str, Bucket]


def leaf(table: str, columns: Columns, values: Sequence[Any]) -> str:
    """Return a row's digest. A text is preceded by its length, so that two different rows never have the same text."""
    parts = [_text(kind, value) for (_, kind), value in zip(columns, values, strict=True)]
    return digest(LEAF, f"{table}|{'|'.join(parts)}")


def _text(kind: str, value: Any) -> str:
    if value is None:
        return NULL
    if kind == "text":
        return f"{len(value)}:{value}"
    return value.hex() if kind == "bytes" else str(value)


def digest(level: str, text: str) -> str:
    """Return the SHA-256 of a text of a level, in hex."""
    return sha256((level + text).encode("utf-8", "surrogatepass")).hexdigest()


def node(leaves: Iterable[str]) -> Bucket:
    """Return the node over some leaves, in any order."""
    ordered = sorted(leaves)
    return Bucket(len(ordered), digest(NODE, "".join(ordered)))


def buckets(nodes: Buckets, digits: int = BUCKET_DIGITS) -> dict[str, Bucket]:
    """Return the buckets over nodes by the first digits of their ids."""
    made = {}
    for prefix, group in groupby(sorted(nodes.items()), key=lambda one: one[0][:digits]):
        below = list(group)
        text = "".join(f"{name}:{one.rows}:{one.digest}\n" for name, one in below)
        made[prefix] = Bucket(sum(one.rows for _, one in below), digest(BUCKET, text))
    return made


def table_of(found: Buckets) -> dict[str, Any]:
    """Return a table's part of a certificate: `{rows, digest, buckets: {prefix: [rows, digest]}}`."""
    text = "".join(f"{name}:{one.rows}:{one.digest}\n" for name, one in sorted(found.items()))
    return {
        "rows": sum(one.rows for one in found.values()),
        "digest": digest(TABLE, text),
        "buckets": {name: list(one) for name, one in sorted(found.items())},
    }


def root_of(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the digest over all tables."""
    text = "".join(f"{name}:{one['rows']}:{one['digest']}\n" for name, one in sorted(tables.items()))
    return digest(ROOT, text)


def buckets_in(table: Mapping[str, Any]) -> dict[str, Bucket]:
    """Return the buckets in a table's part of a certificate."""
    return {name: Bucket(*one) for name, one in table["buckets"].items()}


def differences(
    certified: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return each bucket that differs: `{table, ids, from, to, certified_rows, found_rows}`; times are of the ids."""
    differing = []
    for name in sorted(certified.keys() | found.keys()):
        ours = buckets_in(certified[name]) if name in certified else {}
        theirs = buckets_in(found[name]) if name in found else {}
        for prefix in sorted(ours.keys() | theirs.keys()):
            if ours.get(prefix) != theirs.get(prefix):
                rows = {"certified_rows": _rows(ours, prefix), "found_rows": _rows(theirs, prefix)}
                differing.append({"table": name, "ids": prefix, **_times(name, prefix), **rows})
    return differing


def _rows(of: Buckets, prefix: str) -> int:
    return of[prefix].rows if prefix in of else 0


def _times(table: str, prefix: str) -> dict[str, str]:
    """Return the first and the last time of the ids with a prefix; nothing for findings and for invented prefixes."""
    try:
        first = int(prefix, 16) * BUCKET_MS
        times = [datetime.fromtimestamp(ms / 1000, UTC) for ms in (first, first + BUCKET_MS)]
    except (ValueError, OverflowError, OSError):
        return {}
    if table == FINDING:
        return {}
    return {"from": times[0].isoformat(timespec="seconds"), "to": times[1].isoformat(timespec="seconds")}
