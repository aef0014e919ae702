"""Finds the transactions of a day whose stored half messages are not those that were posted.

The digest covers the content, the context and the policy. Postgres computes the digest of the usual transaction, which
is most of a day, and that of each body, and compares a reissue with its record. This process reads what Postgres cannot
confirm, without bodies, and judges it: SQL cannot compute the digest of every context exactly.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pyspark.sql import SparkSession

from spark.half_digest import StoredMessage, digest_of, is_altered
from spark.postgres.connections import Day, Snapshot, partition_name
from spark.sources.scan import write_found


def _text_of(column: str) -> str:
    """Return the SQL of the JSON of a text whose characters need no escape."""
    return f"""coalesce('"' || {column} || '"', 'null')"""


def _text_of_object(column: str) -> str:
    """Return the SQL of the JSON of a text that is the JSON of a jsonb object whose texts need no escape.

    The first space of jsonb's own text is left out. With several names or values that nest, other spaces stay, which
    the service does not write.
    """
    json = f"{column}::text"
    return f"""case when {column} is null then 'null' when jsonb_typeof({column}) = 'object' then '"' || replace(
      overlay({json} placing '' from strpos({json}, '": ') + 2 for 1), '"', chr(92) || '"') || '"' end"""


# The JSON of which the digest of a transaction of one message is, as `spark.half_digest.digest_of` has it, after the
# first value, which says whether the half was posted to `/messages`.
_TEXT = f"""concat(',', {_text_of("h.producer_group")}, ',[[', {_text_of("h.topic")}, ',', {_text_of("h.key")}, ',',
    {_text_of("h.tag")}, ',', {_text_of_object("h.headers")}, ',', {_text_of("h.content_type")}, ',"',
    encode(h.body_digest, 'base64'), '",null]],', {_text_of_object("h.context")}, ',null]')"""
# The texts that are put into it unescaped.
_PLAIN = "concat(h.producer_group, h.topic, h.key, h.tag, h.content_type)"
# Whether a row `h` of half is the only message of a transaction, without a delay and a policy, and has its digest. Null
# counts as false. If a transaction has more messages than a confirmed one, the others are not confirmed. Without quotes
# and backslashes in the values, no other content has the same text.
CONFIRMED = f"""h.position = 0 and num_nulls(h.deliver_after_s, h.policy) = 2
  and strpos({_PLAIN}, '"') = 0 and strpos({_PLAIN}, chr(92)) = 0
  and (num_nulls(h.headers, h.context) = 2 or strpos(concat(h.headers, h.context), chr(92)) = 0)
  and (h.digest = sha256(convert_to('[false' || {_TEXT}, 'UTF8'))
    or h.digest = sha256(convert_to('[true' || {_TEXT}, 'UTF8')))"""
_ROWS = """
select h.transaction_id::text, h.position, h.producer_group, h.topic, h.key, h.tag, h.headers::text, h.content_type,
  h.body_digest, h.deliver_after_s, h.context::text, h.policy::text, h.digest, concat_ws(', ',
    case when sha256(h.body) <> h.body_digest then 'body' end,
    case when h.position = 0 and h.reissued_from is distinct from (
      select r.transaction_id from reissue r where r.reissued_as = h.transaction_id
    ) and (h.reissued_from is null or exists (
      select from day d where d.low <= h.reissued_from and d.high > h.reissued_from and d.state <> 'gone'
    )) then 'reissued_from' end
  ) as differs
from {half} h"""
# Served by half's primary key, which has a transaction's rows together. A reissue of a transaction whose day is gone
# has no record.
UNCONFIRMED = f"""{_ROWS}
where h.transaction_id >= '{{low}}' and h.transaction_id < '{{high}}' and (
  {CONFIRMED}
  and sha256(h.body) = h.body_digest and h.reissued_from is null and h.transaction_id not in (
    select reissued_as from reissue where reissued_as >= '{{low}}' and reissued_as < '{{high}}'
  )
) is not true
order by h.transaction_id, h.position
"""  # noqa: S608 -- texts of ours
WHOLE = f"{_ROWS} where h.transaction_id = any('{{{{{{ids}}}}}}'::uuid[]) order by h.transaction_id, h.position"
# One statement names so many transactions.
WHOLE_AT_ONCE = 1000


def write_altered(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's altered transactions (schemas.ALTERED) to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    half = partition_name("half", day.day)

    def found_in(batches: Any) -> Iterator[dict[str, Any]]:
        cut: list[str] = []
        for one, messages, differing in _transactions(batches):
            if messages[0].position:
                # Its first message was confirmed, or is missing.
                cut.append(one)
            else:
                yield from _altered(messages, differing)
        for start in range(0, len(cut), WHOLE_AT_ONCE):
            with snapshot.readers.cursor() as cursor:
                cursor.execute(WHOLE.format(half=half, ids=",".join(cut[start : start + WHOLE_AT_ONCE])))
                with cursor.fetch_record_batch() as whole:
                    for _, messages, differing in _transactions(whole):
                        yield from _altered(messages, differing)

    return write_found(spark, snapshot, day, UNCONFIRMED, directory, found_in)


def _transactions(batches: Any) -> Iterator[tuple[str, list[StoredMessage], set[str]]]:
    """Yield the id of each transaction in record batches, its messages, and what Postgres found in them."""
    for one, rows in groupby(_rows(batches), key=lambda row: row[0].transaction_id):
        messages: list[StoredMessage] = []
        differing: set[str] = set()
        for message, found in rows:
            messages.append(message)
            if found:
                differing.update(found.split(", "))
        yield one, messages, differing


def _rows(batches: Any) -> Iterator[tuple[StoredMessage, str]]:
    for batch in batches:
        *columns, found = [batch.column(place).to_pylist() for place in range(batch.num_columns)]
        yield from zip(map(StoredMessage._make, zip(*columns, strict=True)), found, strict=True)


def _altered(messages: list[StoredMessage], differing: set[str]) -> Iterator[dict[str, Any]]:
    altered = is_altered(messages)
    if altered or differing:
        first = messages[0]
        yield {
            "differs": ", ".join([*(["digest"] if altered else []), *sorted(differing)]),
            "transaction_id": first.transaction_id,
            "producer_group": first.producer_group,
            "digest": None if first.digest is None else first.digest.hex(),
            "computed": digest_of(messages).hex(),
        }
