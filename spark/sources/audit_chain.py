"""Finds rows of the audit that were changed, removed or inserted, by the chain of their digests.

Each row has its place in the chain, and the digest of its content and of the digest before it. The table audit_chain
has the last place, and the last one that was removed because of its age. The audit is small and of no day, so the whole
chain is compared in Postgres for the day before the run, or for another if that one is removed.

Upkeep removes rows that are past their age, and says how far in audit_chain and evidence_since. Certificates show what
it must not have removed yet: they are signed, and their times are known.
"""

from typing import Any

from pyspark.sql import SparkSession

from spark.postgres.connections import Connection, Day, Snapshot
from spark.sources.scan import reported_once, rows_of, write_found

# As the trigger computes it; the digest before it is $before.
DIGEST = """sha256(convert_to(jsonb_build_array(a.place, encode({before}, 'hex'), a.audit_id,
    to_char(a.at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'), a.actor, a.key_id, a.role, a.what, a.target,
    a.detail)::text, 'UTF8'))"""
# The rows that so many of the newest certificates name are compared: a year of days that are certified once a day.
CERTIFICATES = 400
# A row is committed seconds after its `at`, by another clock than that of certificates.
AGES_DIFFER = "1 hour"
# Rows from before there was a chain have no place, and lower ids than those that have one. The second part compares the
# last row with what audit_chain says of it. The third part compares the rows that certificates name: who can write to
# the database can remove the last rows together with their mention in audit_chain, and cannot sign a certificate. The
# first certificate that differs is enough.
#
# A row after the place that a certificate names is younger than that certificate. So it must not be gone while the
# certificate is younger than rows are kept: by the setting of this run, or of the run that wrote a certificate until
# the next one, because the setting may have been raised. All certificates count here. The same holds for the time since
# which audit rows are complete. That of verdicts is set by a migration, once.
BROKEN = f"""
with known as materialized (
  select sequence, (audit ->> 'place')::bigint as place, decode(audit ->> 'digest', 'hex') as digest,
    seen_at, coalesce(lead(seen_at) over (order by seen_at, sequence), '{{seen}}'::timestamptz)
      - (audit ->> 'kept_s')::bigint * interval '1 second' as kept_from,
    (audit ->> 'verdicts_since')::timestamptz as verdicts_since
  from (
    select sequence, document::jsonb -> 'certificate' -> 'audit' as audit,
      (document::jsonb -> 'certificate' ->> 'seen_at')::timestamptz as seen_at
    from day_certificate
  ) written
), kept as (
  select greatest('{{seen}}'::timestamptz - interval '{{audit_keep_s}} seconds', max(kept_from))
    + interval '{AGES_DIFFER}' as since
  from known
)
select a.audit_id::text as subject, a.audit_id, a.place, coalesce(a.before_place, c.forgotten_place) as before_place,
  case
    when a.place is null then 'not chained'
    when a.place is distinct from coalesce(a.before_place, c.forgotten_place) + 1 then 'removed before'
    when a.digest is distinct from {DIGEST.format(before="coalesce(a.before_digest, c.forgotten_digest)")} then 'digest'
  end as differs
from (
  select *, lag(place) over chain as before_place, lag(digest) over chain as before_digest,
    min(audit_id) filter (where place is not null) over () as first_id
  from audit window chain as (order by place nulls last)
) a left join audit_chain c on true
where a.place is not null or a.audit_id > a.first_id
union all
select 'head', l.audit_id, l.place, c.place,
  case when coalesce(l.place, c.forgotten_place) < c.place then 'removed after' else 'head' end
from (select) one
left join audit_chain c on true
left join (select audit_id, place, digest from audit where place is not null order by place desc limit 1) l on true
where c.place is null
  or (coalesce(l.place, c.forgotten_place), coalesce(l.digest, c.forgotten_digest)) is distinct from (c.place, c.digest)
union all
(
  select 'certificate ' || k.sequence, a.audit_id, k.place, c.place, 'certified'
  from (select * from known order by sequence desc limit {CERTIFICATES}) k
  left join audit_chain c on true
  left join audit a on a.place = k.place
  where k.place > coalesce(c.forgotten_place, 0) and a.digest is distinct from k.digest
    or k.place = c.forgotten_place and k.place > 0 and c.forgotten_digest <> k.digest
  order by k.sequence limit 1
)
union all
(
  select 'forgotten', null, c.forgotten_place, k.place, 'removed early'
  from known k cross join kept cross join audit_chain c
  where k.place < c.forgotten_place and k.seen_at > kept.since
  order by k.sequence limit 1
)
union all
select 'since ' || e.name, null, null, null, 'since'
from evidence_since e cross join kept
where e.name = 'audit' and e.at > kept.since
  or e.name = 'verdict' and e.at > (select min(verdicts_since) from known)
"""  # noqa: S608 -- constants
UNTOLD = f"""
select b.* from ({BROKEN}) b where b.differs is not null and {reported_once("audit_broken", "b.subject")}
"""  # noqa: S608 -- constants

HEAD = """
select c.place, c.digest, e.at::text as since from (select) one left join audit_chain c on true
  left join evidence_since e on e.name = 'verdict'
"""


def certified(connection: Connection, kept_s: int) -> dict[str, Any]:
    """Return what a certificate says of the audit: its last row, how long rows are kept, and since when verdicts have
    their evidence.

    The place is 0 and the digest empty without any row.
    """
    row = connection.execute(HEAD).fetchone()
    assert row is not None
    return {
        "place": row["place"] or 0,
        "digest": bytes(row["digest"] or b"").hex(),
        "kept_s": kept_s,
        # As text: of a database that always had this evidence it is -infinity.
        "verdicts_since": row["since"],
    }


def write_broken(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the breaks of the audit's chain (schemas.AUDIT_BROKEN) to files in `directory`; return their number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        UNTOLD,
        directory,
        rows_of,
        whole=True,
    )
