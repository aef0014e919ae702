"""Finds the verdicts of a day that lack the evidence of their source, and evidence without its verdict.

A check's verdict has an attempt that was answered with it. A person's has an audit row with the same actor and reason.
Policy's has as many checks answered `unknown` as the policy says. The service writes the evidence before the verdict or
in the same statement, so no crash separates them. The comparison runs in Postgres, and only verdicts without evidence
leave it.
"""

from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

# The audit row of a verdict is written at most this long before it. Audit rows are kept for a limited time.
NOTED_BEFORE = "1 hour"
# The producer group of the service's own operational messages, which policy commits at once.
OWN_GROUP = "halfnote"
# `said`: the verdicts by which checks decided, 0 for an attempt that contradicts itself. An attempt whose verdict was
# recorded before has the source of that verdict. A check that was answered twice, by its URL and by `/end`, counts as
# one.
#
# A person's verdict has an audit row also if it was refused because another one was recorded. So an audit row accuses a
# verdict of another source only if that verdict has the row's reason. A producer's verdict with the reason that policy
# gives, after as many answers as that reason says, was policy's.
#
# For a policy, `max_checks` is the transaction's own, which its digest covers. A group's may have been changed since,
# so the lower one of today's and that of the reason counts, and one at least. Served by the primary keys and by
# audit_target. Verdicts from before `since` left less evidence. Audit rows from before `audit_since` may have been
# removed because of their age.
WITHOUT_EVIDENCE = f"""
with limits as (
  select coalesce(max(at) filter (where name = 'verdict'), '-infinity') as since,
    coalesce(max(at) filter (where name = 'audit'), '-infinity') + interval '{NOTED_BEFORE}' as audit_since
  from evidence_since
), asked as (
  select transaction_id, max(at) as at, count(distinct number) filter (where outcome = 'unknown') as answers,
    array_agg(distinct case when outcome = 'commit' and verdict = 1 then 1 when outcome = 'rollback' and verdict = 2
      then 2 else 0 end) filter (where outcome in ('commit', 'rollback') and source = 1) as said
  from {{attempt}}
  where kind = 'check' and transaction_id >= '{{low}}' and transaction_id < '{{high}}'
  group by transaction_id
), judged as (
  select coalesce(p.transaction_id, a.transaction_id) as transaction_id, p.verdict, p.source, p.actor, p.reason,
    p.decided_at, coalesce(a.answers, 0) as answers, a.said, a.at
  from (
    select * from {{op}} where transaction_id >= '{{low}}' and transaction_id < '{{high}}'
  ) p full join asked a on a.transaction_id = p.transaction_id
  where p.source <> 0 or p.actor is not null or p.reason is not null or a.said is not null
), acts as (
  select case what when 'transaction.verdict' then target::uuid end as transaction_id, at from audit
  where what = 'transaction.verdict' and target >= '{{low}}' and target < '{{high}}'
  union all
  select reissued_as, at from reissue where reissued_as >= '{{low}}' and reissued_as < '{{high}}'
)
select transaction_id::text, producer_group, verdict, source, answers, differs from (
  select j.transaction_id, h.producer_group, j.verdict, j.source, j.answers, concat_ws(', ',
    case when j.source = 1 and j.decided_at >= l.since and (j.verdict = any (j.said)) is not true then 'answer' end,
    case when j.said is not null and j.at >= l.since
      and (j.source = 1 and j.said = array[j.verdict::int]) is not true then 'verdict' end,
    case when policy.judged and j.verdict = 1 then 'commit' end,
    case when policy.judged and j.answers < policy.max_checks then 'answers' end,
    case when j.source = 3 and j.decided_at >= greatest(l.since, l.audit_since) then
      case when u.by_actor is null then 'audit' when not u.by_actor then 'actor' when not u.as_said then 'reason' end
    end,
    case when j.source <> 3 and j.actor is not null and j.decided_at >= l.since then 'actor' end,
    case when j.decided_at >= l.since and (j.source <> 3 and u.for_reason
      or j.source = 0 and j.verdict = 2 and j.answers >= policy.said_answers) then 'source' end
  ) as differs
  from judged j
  cross join limits l
  cross join (values (interval '{CLOCKS_DIFFER_S} seconds')) skew (most)
  left join {{half}} h on h.transaction_id = j.transaction_id and h.position = 0
    and h.transaction_id >= '{{low}}' and h.transaction_id < '{{high}}'
  left join producer_group g on g.name = h.producer_group
  cross join lateral (
    select j.source = 2 and h.born_at >= l.since and h.producer_group <> '{OWN_GROUP}' as judged, coalesce(
      case when jsonb_typeof(h.policy -> 'max_checks') = 'number' then (h.policy ->> 'max_checks')::numeric end,
      greatest(1, least(g.max_checks, substring(j.reason from '^(\\d{{{{1,9}}}}) checks ')::int))
    ) as max_checks, substring(j.reason from '^(\\d{{{{1,9}}}}) checks were answered `unknown`$')::int as said_answers
  ) policy
  cross join lateral (
    select bool_or(by_actor) as by_actor, bool_or(by_actor and as_said) as as_said,
      bool_or(as_said and u.at <= j.decided_at + skew.most) and j.reason is not null as for_reason
    from audit u cross join lateral (
      select j.actor is not distinct from case when u.detail ->> 'actor' <> u.actor
        then (u.detail ->> 'actor') || ' (key ' || u.actor || ')' else u.actor end as by_actor,
        j.reason is not distinct from u.detail ->> 'reason' as as_said
    ) compared
    where (j.source = 3 or j.reason is not null) and u.target in (j.transaction_id::text, h.reissued_from::text)
      and case u.what
      when 'transaction.verdict' then u.target = j.transaction_id::text
        and u.detail ->> 'verdict' = case j.verdict when 1 then 'commit' else 'rollback' end
      when 'transaction.reissue' then j.verdict = 1 and u.detail ->> 'reissued_as' = j.transaction_id::text
    end
  ) u
) compared
where differs <> ''
union all
select distinct a.transaction_id::text, null, null::smallint, null::smallint, 0, 'transaction'
from acts a cross join limits l
where a.at >= l.since and not exists (
    select from {{half}} h where h.transaction_id = a.transaction_id
      and h.transaction_id >= '{{low}}' and h.transaction_id < '{{high}}'
  ) and not exists (
    select from {{op}} p where p.transaction_id = a.transaction_id
      and p.transaction_id >= '{{low}}' and p.transaction_id < '{{high}}'
  )
"""  # noqa: S608 -- constants


def write_without_evidence(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's verdicts without evidence (schemas.WITHOUT_EVIDENCE) to files in `directory`; return their
    number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        WITHOUT_EVIDENCE,
        directory,
        rows_of,
    )
