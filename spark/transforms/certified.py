"""The digest tree of a day (spark/certificate/tree.py), computed by Spark; and the rule that compares it.

A row's digest is computed where the row lies; then the digests of 65 seconds of ids, 64 characters each, come together.
The driver gets one row for each such group and table: at most 5,300 for a day whose ids are its own.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import reduce
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from spark.certificate import tree
from spark.certificate.tree import COLUMNS_OF, FINDING, FINDINGS, Bucket, Columns
from spark.frames import Frames
from spark.transforms.finding import of_rows
from spark.transforms.joined import Joined


def tables_of(f: Frames, receipts_before: datetime, format_: int) -> dict[str, dict[str, Any]]:
    """Return the tables of a day's certificate of a format. Redeliveries add later receipts, which are left out."""
    # A policy is read at position 0 only.
    frames = {"half": f.half, "op": f.op, "outbox": f.outbox}
    frames["receipt"] = f.receipt.where(F.col("settled_at") < F.lit(receipts_before))
    columns = COLUMNS_OF[format_]
    digests = [_leaves(frame, table, columns[table], _prefix()) for table, frame in frames.items()]
    found: dict[str, dict[str, Bucket]] = {table: {} for table in columns}
    for row in _nodes(reduce(DataFrame.unionByName, digests)).collect():
        found[row["table"]][row["prefix"]] = Bucket(row["rows"], row["digest"])
    return {table: tree.table_of(tree.buckets(nodes)) for table, nodes in found.items()}


def findings_table(findings: DataFrame) -> dict[str, Any]:
    """Return the findings' part of a day's certificate; its buckets are the kinds."""
    rows = _nodes(_leaves(findings, FINDING, FINDINGS, F.col("kind"))).collect()
    return tree.table_of({row["prefix"]: Bucket(row["rows"], row["digest"]) for row in rows})


def certificate_differs(j: Joined) -> DataFrame:
    """A bucket of a certified day's rows has other rows than were certified; or the certificate itself was changed."""
    assert j.whole.certified is not None
    return of_rows(j.whole.op.sparkSession, [_finding(j, one) for one in j.whole.certified])


def _finding(j: Joined, one: Mapping[str, Any]) -> dict[str, Any]:
    subject = f"{one['table']} {one['ids']}" if "table" in one else "certificate"
    return {"day": str(j.whole.day), "kind": "certificate_differs", "subject": subject, "detail": one}


def _prefix() -> Column:
    return F.substring("transaction_id", 1, tree.NODE_DIGITS)


def _leaves(frame: DataFrame, table: str, columns: Columns, prefix: Column) -> DataFrame:
    parts = [F.coalesce(_text(kind, F.col(f"`{name}`")), F.lit(tree.NULL)) for name, kind in columns]
    text = F.concat(F.lit(f"{tree.LEAF}{table}|"), F.concat_ws("|", *parts))
    return frame.select(F.lit(table).alias("table"), prefix.alias("prefix"), F.sha2(text, 256).alias("leaf"))


def _text(kind: str, column: Column) -> Column:
    if kind == "text":
        return F.concat(F.char_length(column).cast("string"), F.lit(":"), column)
    if kind == "bytes":
        return F.lower(F.hex(column))
    if kind == "time":
        return F.unix_micros(column).cast("string")
    return column.cast("string")


def _nodes(leaves: DataFrame) -> DataFrame:
    """Return `table`, `prefix`, `rows` and `digest` of the nodes over leaves."""
    ordered = F.array_join(F.sort_array(F.collect_list("leaf")), "")
    digest = F.sha2(F.concat(F.lit(tree.NODE), ordered), 256)
    return leaves.groupBy("table", "prefix").agg(F.count("*").alias("rows"), digest.alias("digest"))
