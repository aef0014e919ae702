-- The proof's rules over one day in Postgres, as one script: kind and subject of each finding in the table `found`.
-- Every rule that needs only the day's rows, as over Parquet: without archive, ledgers, certificates, and the comparisons
-- that the proof makes while it reads. $half … $attempt are the day's partitions, $low and $high its ids, $seen_at the
-- time of the snapshot, $sla_s a delivery's time, $receipts_since since when a redelivery leaves a receipt. Docstrings in
-- spark/transforms say why each rule is as it is. Second verdicts and the rows of earlier days are left out.

create temp table moment as
select '$seen_at'::timestamptz as seen_at, '$seen_at'::timestamptz - make_interval(secs => $sla_s) as on_time,
  '$receipts_since'::timestamptz as receipts_since;

-- Each subscription by the last version in its history. `lowest`: it has passed all messages up to there.
create temp table route as
with marked as (
  select *,
    case when topics is distinct from lag(topics) over w or filters is distinct from lag(filters) over w
      then "at" end as matches,
    case when state is distinct from lag(state) over w then "at" end as entered
  from subscription_version window w as (partition by subscription_id order by "at", version_id)
), known as (
  select distinct on (subscription_id) subscription_id, name, topics, filters, ordered, started_after, deleted_at,
    min("at") over s as created_at, max(matches) over s as matches_since,
    case when state = 'active' and deleted_at is null then max(entered) over s end as works_since
  from marked window s as (partition by subscription_id) order by subscription_id, "at" desc, version_id desc
), lowest as (
  select subscription_id, min("offset") as lowest, count(*) = max(shards) and min(shards) = max(shards) as whole_layout
  from checkpoint group by subscription_id
)
select k.subscription_id, k.name, k.topics, k.ordered, k.started_after, k.created_at, k.deleted_at, k.works_since,
  k.matches_since, k.matches_since + interval '60 seconds' as judged_from,
  k.deleted_at + interval '60 seconds' as matches_until,
  coalesce(c.whole_layout, false) as whole_layout, coalesce(c.lowest, 0) as lowest,
  case when jsonb_array_length(k.filters->'tags') > 0
    then array(select jsonb_array_elements_text(k.filters->'tags')) end as tags,
  nullif(k.filters->'headers', '{}') as headers
from known k left join lowest c using (subscription_id);

create temp table taker as
select t.topic, r.* from (select distinct topic from $outbox) t join route r on exists (
  select from unnest(r.topics) as p where t.topic = p or (
    right(p, 1) = '*' and t.topic ^@ left(p, -1) and (not t.topic ^@ 'halfnote.' or left(p, -1) ^@ 'halfnote.')
  )
);
analyze taker;

-- Messages in the outbox with their subscriptions by topic; `matched` is null if the half is gone and cannot decide.
create temp table sent as
select o.transaction_id, o.position, o."offset", o.committed_at, coalesce(o.due_at, o.committed_at) as due_from,
  t.subscription_id,
  case when t.tags is not null and coalesce(o.tag <> all (t.tags), true) then false
    when t.headers is null then true
    when h.transaction_id is not null then coalesce(h.headers @> t.headers, false) end as matched
from $outbox o join taker t on t.topic = o.topic
left join $half h on t.headers is not null and h.transaction_id = o.transaction_id and h.position = o.position;
analyze sent;

-- Of the live delivery, and whether there is a receipt, also a replay's.
create temp table trace as
select transaction_id, position, subscription_id, min(live) as live, bool_or(traced) as traced,
  bool_or(received) as received
from (
  select transaction_id, position, subscription_id, case when replay = 0 then first_at end as live,
    replay = 0 as traced, true as received from $receipt
  union all select transaction_id, position, subscription_id, null, true, false from delivery_retry
    where replay = 0 and transaction_id >= '$low' and transaction_id < '$high'
  union all select transaction_id, position, subscription_id, null, true, false from dead_letter
    where replay = 0 and transaction_id >= '$low' and transaction_id < '$high'
  union all select transaction_id, position, subscription_id, null, true, false from redelivery, moment
    where replay = 0 and (receipts_since is null or what = 'dropped' or "at" < receipts_since)
      and transaction_id >= '$low' and transaction_id < '$high'
) t
group by transaction_id, position, subscription_id;
analyze trace;

create temp table policy as
select h.transaction_id, h.producer_group, h.born_at, h.first_check_at,
  coalesce((h.policy->>'interval_s')::float8, g.interval_s, (select value from shared_rule where name = 'interval_s'))
    as interval_s,
  coalesce((h.policy->>'max_checks')::float8, g.max_checks, (select value from shared_rule where name = 'max_checks'))
    as max_checks,
  coalesce(g.unanswered_park_s, (select value from shared_rule where name = 'unanswered_park_s')) as unanswered_park_s
from $half h left join producer_group g on g.name = h.producer_group
where h.position = 0 or h.position = (select min(position) from $half f where f.transaction_id = h.transaction_id);

create temp table found (kind text not null, subject text not null);

insert into found
select 'op_without_half', p.transaction_id from $op p
where not exists (select from $half h where h.transaction_id = p.transaction_id);

-- Of several messages, one is nowhere.
insert into found
select 'op_without_half', h.transaction_id
from (select transaction_id, max(position) as last from $half group by transaction_id having max(position) > 0) h
where exists (select from $op p where p.transaction_id = h.transaction_id) and h.last + 1 > (
  select count(*) from (
    select position from $half r where r.transaction_id = h.transaction_id
    union select position from $outbox o where o.transaction_id = h.transaction_id and o.position <= h.last
  ) there
);

insert into found
select 'half_stuck', h.transaction_id
from policy h cross join moment m left join check_back c on c.transaction_id = h.transaction_id
where not exists (select from $op p where p.transaction_id = h.transaction_id) and c.state is distinct from 2
  and (case when c.state is null then h.first_check_at + interval '7200 seconds'
    else least(
      c.next_check_at + make_interval(secs => (select sum(value) + 7200 from shared_rule where name in ('longest_hold_s', 'longest_backoff_s'))),
      c.unanswered_since + make_interval(secs => h.unanswered_park_s + h.interval_s + (select sum(value) + 7200 from shared_rule where name in ('longest_hold_s', 'longest_backoff_s')))
    ) end < m.seen_at
    or case when c.state is null then h.first_check_at > h.born_at + interval '93600 seconds'
      else c.next_check_at > m.seen_at + interval '93600 seconds' end);

insert into found
select distinct 'committed_not_published', h.transaction_id
from $half h join $op p on p.transaction_id = h.transaction_id and p.verdict = 1
where not exists (select from $outbox o where o.transaction_id = h.transaction_id and o.position = h.position);

insert into found
select distinct 'published_without_commit', o.transaction_id || '-' || o.position
from $outbox o left join $op p on p.transaction_id = o.transaction_id
where p.verdict is null or (
  exists (select from $half h where h.transaction_id = o.transaction_id)
  and not exists (select from $half h where h.transaction_id = o.transaction_id and h.position = o.position)
);

insert into found
select distinct 'published_after_rollback', o.transaction_id || '-' || o.position
from $outbox o join $op p on p.transaction_id = o.transaction_id and p.verdict = 2;

insert into found
select 'offset_of_two_messages', "offset" from $outbox
group by "offset" having count(*) > 1 and count(distinct (transaction_id, position)) > 1;

insert into found
select 'message_with_two_offsets', transaction_id || '-' || position from $outbox
group by transaction_id, position having min("offset") < max("offset");

insert into found
select distinct 'offsets_contradict_time', "offset" from (
  select "offset", committed_at, lag(committed_at) over (order by "offset", committed_at) as before_at from $outbox
) o
where committed_at < before_at;

insert into found
select distinct 'unrouted', o.topic from $outbox o
where not o.topic ^@ 'halfnote.' and not exists (
  select from sent s join route r on r.subscription_id = s.subscription_id
  where s.transaction_id = o.transaction_id and s.position = o.position and coalesce(s.matched, true)
    and s."offset" > r.started_after and (r.deleted_at is null or s.committed_at < r.deleted_at)
    and (s.committed_at >= r.matches_since or s."offset" > r.lowest)
) and not exists (
  select from trace t where t.transaction_id = o.transaction_id and t.position = o.position and (t.traced or t.received)
);

insert into found
select distinct 'undelivered', s.transaction_id || '-' || s.position || ':' || s.subscription_id
from sent s join route r on r.subscription_id = s.subscription_id, moment m
where s.matched and r.deleted_at is null and s."offset" > r.started_after and s."offset" <= r.lowest
  and s.committed_at >= r.judged_from and s.committed_at <= m.on_time
  and not exists (
    select from trace t where t.transaction_id = s.transaction_id and t.position = s.position
      and t.subscription_id = s.subscription_id and t.traced
  );

insert into found
select distinct 'delivery_late', r.name
from sent s join route r on r.subscription_id = s.subscription_id, moment m
where s.matched and r.works_since <= m.on_time and s."offset" > r.lowest and s."offset" > r.started_after
  and s.committed_at >= r.judged_from and s.due_from <= m.on_time
  and not exists (
    select from trace t where t.transaction_id = s.transaction_id and t.position = s.position
      and t.subscription_id = s.subscription_id and t.traced
  ) and not exists (
    select from redelivery d where d.transaction_id = s.transaction_id and d.position = s.position
      and d.subscription_id = s.subscription_id and d.replay = 0
  );

insert into found
select distinct 'retry_overdue', r.name
from delivery_retry d join route r on r.subscription_id = d.subscription_id, moment m
where d.due_at <= m.on_time and r.works_since <= m.on_time
  and not coalesce(r.ordered = 'key' and d.key is not null and d.attempts = 0, false)
  and d.transaction_id >= '$low' and d.transaction_id < '$high';

insert into found
select 'checkpoint_differs', r.name from route r, moment m
where r.deleted_at is null and not r.whole_layout and r.created_at <= m.on_time;

insert into found
select distinct 'receipt_without_message', t.transaction_id || '-' || t.position || ':' || t.subscription_id
from trace t
where t.received
  and not exists (select from $outbox o where o.transaction_id = t.transaction_id and o.position = t.position);

insert into found
select distinct 'receipt_not_matched', t.transaction_id || '-' || t.position || ':' || t.subscription_id
from trace t join $outbox o on o.transaction_id = t.transaction_id and o.position = t.position
left join route r on r.subscription_id = t.subscription_id
left join sent s on s.transaction_id = t.transaction_id and s.position = t.position
  and s.subscription_id = t.subscription_id
where t.live is not null
  and (r.judged_from is null or o.committed_at >= r.judged_from and t.live >= r.judged_from)
  and (r.name is null or s.transaction_id is null or not s.matched or o."offset" <= r.started_after
    or o.committed_at > r.matches_until);

insert into found
select 'content_differs', transaction_id || '-' || position from (
  select transaction_id, position, body_digest as digest from $half
  union all select transaction_id, position, digest from $receipt where digest is not null
) d
group by transaction_id, position having min(digest) <> max(digest);

insert into found
select 'parked', c.transaction_id from check_back c
where c.state = 2 and c.transaction_id >= '$low' and c.transaction_id < '$high'
  and not exists (select from $op p where p.transaction_id = c.transaction_id);

insert into found
select distinct 'checks_beyond_max', asked.transaction_id
from (
  select a.transaction_id, count(distinct a.number) as answers from $attempt a
  where a.kind = 'check' and a.outcome = 'unknown' and not exists (
    select from $attempt b where b.transaction_id = a.transaction_id and b.kind = 'parked' and b.at <= a.at
  )
  group by a.transaction_id
  union all select transaction_id, answered from check_back
    where state = 1 and transaction_id >= '$low' and transaction_id < '$high'
) asked left join policy h on h.transaction_id = asked.transaction_id
where asked.answers > coalesce(h.max_checks, (select value from shared_rule where name = 'max_checks'));

insert into found
select distinct 'verdict_refused', coalesce(h.producer_group, 'unknown')
from $attempt a left join policy h on h.transaction_id = a.transaction_id
where a.kind = 'refused';
