"""Finds the transactions of a day whose stored half messages are not those that were posted.

The digest covers the content, the context and the policy. Postgres computes the digest of the usual transaction, which
is nearly all of a day, and that of each body, and compares a reissue with its record. This process reads what Postgres
cannot confirm, without bodies, and judges it: SQL cannot compute the digest of every context exactly.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from pyspark.sql import SparkSession

from spark.half_digest import StoredMessage, digest_of, is_altered
from spark.postgres.connections import Day, Snapshot, partition_name
from spark.sources.scan import write_found

# Each part of a digest's text that is built here is JSON of exactly the stored value, or no JSON that the service
# writes. So a text that has the digest says that the stored values are those that were posted. Forms that differ from
# the service's, as those of some numbers and escapes, confirm nothing.


def _text(column: str) -> str:
    """Return the SQL of the JSON of a text, or of null; `_ESCAPED` says where a text needs escapes."""
    return f"""coalesce('"' || {column} || '"', 'null')"""


def _text_of_object(column: str) -> str:
    """Return the SQL of the JSON of a text that is the JSON of a jsonb object, or of null; null for other jsonb.

    `<column>_text` is jsonb's own text. Of one name, the first space is left out. Of several, which jsonb sorts by
    length, the object is built again in the service's order. Spaces in values that nest stay, and so does that after a
    name which itself has the first one: the service writes none of them.
    """
    json = f"{column}_text"
    without_space = f"""overlay({json} placing '' from strpos({json}, '": ') + 2 for 1)"""
    rebuilt = f"""(select chr(123) || string_agg(to_json(key)::text || ':' || value::text, ',' order by key collate "C")
        || chr(125) from jsonb_each({column}))"""  # noqa: S608 -- names of ours
    return f"""case when {column} is null then 'null' when jsonb_typeof({column}) = 'object' then '"' || replace(
      replace(case when strpos({json}, ', "') = 0 then {without_space} else {rebuilt} end, chr(92), repeat(chr(92), 2)),
      '"', chr(92) || '"') || '"' end"""


def _has_digest(digest: str, group: str, messages: str, context: str) -> str:
    """Return the SQL of whether a half without a policy has its digest, as `spark.half_digest.digest_of` computes it.

    The first value says whether it was posted to `/messages`.
    """
    text = f"""',"' || {group} || '",[' || {messages} || '],' || {context} || ',null]'"""
    return f"""({digest} = sha256(convert_to('[false' || {text}, 'UTF8'))
    or {digest} = sha256(convert_to('[true' || {text}, 'UTF8')))"""


_DELAY = """case when h.deliver_after_s is null then 'null'
      when h.deliver_after_s between 1 and 1e15 and h.deliver_after_s = floor(h.deliver_after_s)
      then h.deliver_after_s::bigint || '.0' end"""
_MESSAGE = f"""'["' || h.topic || '",' || {_text("h.key")} || ',' || {_text("h.tag")} || ',' ||
      {_text_of_object("h.headers")} || ',"' || h.content_type || '","' || encode(h.body_digest, 'base64') || '",' ||
      {_DELAY} || ']'"""
# Whether one of the texts that are put in without escapes has a quote or a backslash. No JSON has control characters.
_ESCAPED = "strpos(h.plain, '\"') + strpos(h.plain, chr(92)) > 0"
_PLAIN = "h.producer_group || h.topic || coalesce(h.key, '') || coalesce(h.tag, '') || h.content_type"
# The rows of a range. OFFSET 0 makes Postgres compute each value once, however often it is used.
_ROWS = f"""
  select h.transaction_id, h.position, h.producer_group, h.topic, h.key, h.tag, h.headers_text, h.content_type,
    h.body_digest, h.deliver_after_s, h.context_text, h.policy, h.digest, h.body_differs, h.reissued_from,
    {_MESSAGE} as message, {_text_of_object("h.context")} as context_json,
    h.policy is null and not ({_ESCAPED}) and not h.body_differs and h.reissued_from is null
      and h.transaction_id not in (
        select reissued_as from reissue where reissued_as >= '{{low}}' and reissued_as < '{{high}}'
      ) as is_usual
  from (
    select h.*, h.headers::text as headers_text, h.context::text as context_text, {_PLAIN} as plain,
      sha256(h.body) <> h.body_digest as body_differs
    from {{half}} h where h.transaction_id >= '{{low}}' and h.transaction_id < '{{high}}' offset 0
  ) h offset 0"""  # noqa: S608 -- texts of ours
# Whether a row is the only message of a transaction and has its digest. Null counts as false. If a transaction has more
# messages than a confirmed one, the others are not confirmed.
_IS_WHOLE = f"""h.position = 0 and h.is_usual
  and {_has_digest("h.digest", "h.producer_group", "h.message", "h.context_json")}"""
# Whether the rows of a transaction are all of its messages and have its digest; only those with a second message are
# asked. Aggregates leave out null, so a message without a text must be counted, and a row of which it is not known
# whether it is usual is not.
_ARE_WHOLE = f"""min(h.position) = 0 and max(h.position) = count(*) - 1
    and count(h.message) = count(*) and bool_and(h.is_usual is true)
    and min(h.producer_group collate "C") = max(h.producer_group collate "C") and {
    _has_digest(
        "string_agg(h.digest, '') filter (where h.position = 0)",
        "min(h.producer_group)",
        "string_agg(h.message, ',' order by h.position)",
        "max(h.context_json) filter (where h.position = 0)",
    )
}"""


def _columns(headers: str, context: str, body_differs: str) -> str:
    """Return the SQL of the fields of StoredMessage, and of what differs besides the digest.

    A reissue of a transaction whose day is gone has no record.
    """
    return f"""h.transaction_id::text, h.position, h.producer_group, h.topic, h.key, h.tag, {headers}, h.content_type,
  h.body_digest, h.deliver_after_s, {context}, h.policy::text, h.digest, concat_ws(', ',
    case when {body_differs} then 'body' end,
    case when h.position = 0 and h.reissued_from is distinct from (
      select r.transaction_id from reissue r where r.reissued_as = h.transaction_id
    ) and (h.reissued_from is null or exists (
      select from day d where d.low <= h.reissued_from and d.high > h.reissued_from and d.state <> 'gone'
    )) then 'reissued_from' end
  ) as differs"""  # noqa: S608 -- texts of ours


# Served by half's primary key.
UNCONFIRMED = f"""
with unconfirmed as materialized (
  select * from ({_ROWS}) h where ({_IS_WHOLE}) is not true
), confirmed as (
  select h.transaction_id from unconfirmed h
  where exists (select from unconfirmed second where second.transaction_id = h.transaction_id and second.position = 1)
  group by h.transaction_id having {_ARE_WHOLE}
)
select {_columns("h.headers_text", "h.context_text", "h.body_differs")}
from unconfirmed h
where not exists (select from confirmed c where c.transaction_id = h.transaction_id)
order by h.transaction_id, h.position
"""  # noqa: S608 -- texts of ours
# Served by half's primary key.
WHOLE = f"""
select {_columns("h.headers::text", "h.context::text", "sha256(h.body) <> h.body_digest")}
from {{half}} h where h.transaction_id = any('{{{{{{ids}}}}}}'::uuid[]) order by h.transaction_id, h.position
"""  # noqa: S608 -- texts of ours
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
