"""Finds the transactions of a day whose stored half messages are not those that were posted.

The digest covers the content, the context and the policy. This process reads these columns, without bodies, and
computes each digest again. Postgres computes the digests of the bodies, and compares a reissue with its record. SQL
that builds the same text takes as much time, and is not exact for every context. Making Python objects of the rows
takes most of the time, so Arrow builds the text of usual transactions.
"""

from base64 import b64decode
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from spark.half_digest import StoredMessage, confirmed, digest_of, is_altered
from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import write_found

# Served by half's primary key, which has a transaction's rows together. A reissue of a transaction whose day is gone
# has no record.
HALVES = """
select transaction_id::text, position, producer_group, topic, key, tag, headers::text, content_type,
  encode(body_digest, 'base64') as body_digest, deliver_after_s, context::text, policy::text, digest, concat_ws(', ',
    case when sha256(body) <> body_digest then 'body' end,
    case when h.position = 0 and h.reissued_from is distinct from (
      select r.transaction_id from reissue r where r.reissued_as = h.transaction_id
    ) and (h.reissued_from is null or exists (
      select from day d where d.low <= h.reissued_from and d.high > h.reissued_from and d.state <> 'gone'
    )) then 'reissued_from' end
  ) as differs
from {half} h where h.transaction_id >= '{low}' and h.transaction_id < '{high}' order by h.transaction_id, h.position
"""


_BODY_DIGEST = StoredMessage._fields.index("body_digest")


def write_altered(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's altered transactions (schemas.ALTERED) to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(spark, snapshot, day, HALVES, directory, _altered_in)


def _altered_in(batches: Any) -> Iterator[dict[str, Any]]:
    differing: dict[str, set[str]] = {}
    yield from _altered(_rows(batches, differing), differing)


def _rows(batches: Any, differing: dict[str, set[str]]) -> Iterator[StoredMessage]:
    """Yield the rows of record batches; collect in `differing` what Postgres found in them, by transaction."""
    for whole in batches:
        batch = whole.filter(_unconfirmed(whole))
        *columns, found = [batch.column(place).to_pylist() for place in range(batch.num_columns)]
        columns[_BODY_DIGEST] = map(b64decode, columns[_BODY_DIGEST])
        if any(found):
            for one, names in zip(columns[0], found, strict=True):
                if names:
                    differing.setdefault(one, set()).update(names.split(", "))
        yield from map(StoredMessage._make, zip(*columns, strict=True))


def _unconfirmed(batch: pa.RecordBatch) -> pa.Array:
    # A transaction in which Postgres found something is reported.
    return pa.array(
        [not held or bool(found) for held, found in zip(confirmed(batch), batch["differs"].to_pylist(), strict=True)],
        pa.bool_(),
    )


def _altered(rows: Iterator[StoredMessage], differing: Mapping[str, set[str]]) -> Iterator[dict[str, Any]]:
    for one, group in groupby(rows, key=attrgetter("transaction_id")):
        messages = list(group)
        altered = is_altered(messages)
        if altered or one in differing:
            first = messages[0]
            yield {
                "differs": ", ".join([*(["digest"] if altered else []), *sorted(differing.get(one, ()))]),
                "transaction_id": first.transaction_id,
                "producer_group": first.producer_group,
                "digest": None if first.digest is None else first.digest.hex(),
                "computed": digest_of(messages).hex(),
            }
