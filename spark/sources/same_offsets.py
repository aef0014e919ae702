"""Finds the offsets that a day shares with other days, which shows that the sequence was set back.

spark/transforms/offsets.py compares the offsets within a day. A day is that of the transaction's birth, and an offset
is that of its commit. So the offset ranges of neighboring days may overlap, because a transaction that was born before
midnight may be committed after it. That is correct; an equal offset is not. Each day is compared with those before it,
and with the later ones that are final, which no run reads again after a late commit of this one.
"""

from collections.abc import Iterable

import psycopg
from pyspark.sql import DataFrame, SparkSession

from spark import schemas
from spark.engine.filesystem import FAILURES
from spark.engine.session import is_local
from spark.errors import SnapshotLostError
from spark.postgres import copy
from spark.postgres.connections import Day, Snapshot, first_line, partition_name
from spark.sources.failures import read_failure
from spark.sources.frames import jdbc_in

# Both are served by outbox_by_offset, from its two ends.
SPAN = """
select '{day}'::date as day, (select min("offset") from {outbox}) as low, (select max("offset") from {outbox}) as high
"""
FINAL = "select day from reconciliation_day where state = 'final'"
# Served by outbox_by_offset of both days, within the range that they share.
SAME = """
select e.transaction_id::text as transaction_id, e.position, e."offset" from {other} e
where e."offset" between {low} and {high} and exists (select from {outbox} o where o."offset" = e."offset")
"""


def others_with_same(spark: SparkSession, snapshot: Snapshot, day: Day, staging_dir: str) -> DataFrame | None:
    """Return other days' outbox rows at offsets that the day also has, in schemas.SAME_OFFSET; None: there are none.

    They are written to `staging_dir`/same_offset. Raises RunFailedError, and SnapshotLostError if a day was removed
    meanwhile.
    """
    try:
        final = {row["day"] for row in snapshot.rows(FINAL)}
        others = [one for one in snapshot.days() if one.day < day.day or (one.day > day.day and one.day in final)]
        query = _query(snapshot, day, others)
        if query is None or not snapshot.rows(f"select exists ({query}) as found")[0]["found"]:
            return None
    except psycopg.errors.UndefinedTable as error:
        raise SnapshotLostError(f"A day was removed while offsets were compared: {first_line(error)}") from None
    place = f"{staging_dir}/same_offset"
    try:
        if is_local(spark):
            copy.write_copied(snapshot, [query], place, unlike=schemas.SAME_OFFSET.names, abreast=1)
        else:
            spark.read.jdbc(**jdbc_in(snapshot), table=f"({query}) source").write.parquet(place)
    except (*FAILURES, *copy.FAILURES) as error:
        raise read_failure(error, standby=snapshot.standby) from error
    return spark.read.schema(schemas.SAME_OFFSET).parquet(place)


def _query(snapshot: Snapshot, day: Day, others: Iterable[Day]) -> str | None:
    """Return the query for these rows, or None if no other day's range overlaps the day's."""
    spans = [SPAN.format(day=one.day, outbox=partition_name("outbox", one.day)) for one in (day, *others)]
    found = {row["day"]: row for row in snapshot.rows(" union all ".join(spans)) if row["low"] is not None}
    own = found.pop(day.day, None)
    if own is None:
        return None
    outbox, parts = partition_name("outbox", day.day), []
    for one, span in found.items():
        low, high = max(span["low"], own["low"]), min(span["high"], own["high"])
        if low <= high:
            parts.append(SAME.format(other=partition_name("outbox", one), outbox=outbox, low=low, high=high))
    return " union all ".join(parts) or None
