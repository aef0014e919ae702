"""Finds the transactions of a day whose stored half messages are not those that were posted.

The digest covers the content, the context and the policy. This process reads these columns, without bodies, and
computes each digest again. SQL that builds the same text takes as much time, and is not exact for every context.
Most of the time makes Python objects of the rows: 100,000 transactions take 0.9 s of CPU time here and 0.15 s in
Postgres, on a slow machine.
"""

import json
import time
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import Any
from uuid import UUID

from pyspark.sql import SparkSession

from spark.engine.filesystem import Files
from spark.half_digest import StoredMessage, digest_of, is_altered
from spark.postgres import copy
from spark.postgres.connections import Day, Snapshot, partition_name

# Served by half's primary key, which has a transaction's rows together.
HALVES = """
select transaction_id::text, position, producer_group, topic, key, tag, headers::text, content_type, body_digest,
  deliver_after_s, context::text, policy::text, digest
from {half} h where h.transaction_id >= '{low}' and h.transaction_id < '{high}' order by h.transaction_id, h.position
"""
# The pages of one range of ids, if a day's halves are spread evenly.
PAGES_AT_ONCE = 4096
_MS_BITS = 80


def write_altered(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's altered transactions (schemas.ALTERED) as JSON to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    files, found = Files(spark), 0
    half = partition_name("half", day.day)
    with copy.cursor_in(snapshot) as cursor:
        for number, (low, high) in enumerate(_ranges(day, snapshot.pages(half))):
            began = time.monotonic()
            cursor.execute(HALVES.format(half=half, low=low, high=high))
            with cursor.fetch_record_batch() as batches:
                lines = [json.dumps(one) for one in _altered(_rows(batches))]
            if lines:
                files.write_text(f"{directory}/part-{number:05}.json", "\n".join(lines))
                found += len(lines)
            if copy.others_are_at_work(cursor):
                time.sleep(copy.RESTS * (time.monotonic() - began))
    return found


def _ranges(day: Day, pages: int) -> Iterator[tuple[UUID, UUID]]:
    """Return half-open ranges of ids that divide the day into equal times."""
    low, high = day.low.int >> _MS_BITS, day.high.int >> _MS_BITS
    parts = max(1, pages // PAGES_AT_ONCE)
    borders = [UUID(int=low + (high - low) * part // parts << _MS_BITS) for part in range(1, parts)]
    yield from zip((day.low, *borders), (*borders, day.high), strict=True)


def _rows(batches: Any) -> Iterator[StoredMessage]:
    for batch in batches:
        columns = [batch.column(place).to_pylist() for place in range(batch.num_columns)]
        yield from map(StoredMessage._make, zip(*columns, strict=True))


def _altered(rows: Iterator[StoredMessage]) -> Iterator[dict[str, Any]]:
    for _, group in groupby(rows, key=attrgetter("transaction_id")):
        messages = list(group)
        if is_altered(messages):
            first = messages[0]
            yield {
                "transaction_id": first.transaction_id,
                "producer_group": first.producer_group,
                "digest": None if first.digest is None else first.digest.hex(),
                "computed": digest_of(messages).hex(),
            }
