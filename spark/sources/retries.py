"""Finds retries that are due later than the relay plans them: they hide a message that is never sent. And finds since
when nothing keeps back the next message of a key.

The comparisons run in Postgres. One row for each subscription leaves the first one, and one for each key at most the
second one.
"""

from datetime import timedelta

from adbc_driver_postgresql import dbapi
from pyspark.sql import SparkSession

from spark.postgres.connections import Day, Snapshot, partition_name
from spark.sources.scan import CLOCKS_DIFFER_S, rows_of, write_found

# A consumer that claims may hold a message, or give it back, for this long.
CLAIMED_AT_MOST = "12 hours"
# A worker claims a retry for so long.
SENT_AT_MOST = "15 minutes"
# By jitter, a pause may be longer than the schedule has it; and `Retry-After` may postpone a message this long after
# its first try.
JITTER, POSTPONED_AT_MOST = 0.1, "72 hours"
# A row without a try is due when its producer said, or at once. The schedule is the longest pause that the subscription
# ever had, because its retries keep the due times that they got. Served by the primary keys of delivery_retry's
# partners; delivery_retry itself is small.
NEVER_DUE = f"""
with schedule as (
  select subscription_id, make_interval(secs => max(pause) * (1 + {JITTER})) as longest
  from subscription_version, unnest(retry) pause group by 1
)
select subscription_id, name, count(*) as retries,
  (array_agg(transaction_id || '-' || position order by due_at desc, "offset"))[1] as last,
  to_char(max(due_at) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as due_at
from (
  select s.subscription_id, s.name, r.transaction_id, r.position, r."offset", r.due_at, greatest(
    o.due_at, '{{seen}}', case when r.first_at is not null then greatest(
      '{{seen}}' + c.longest, least(r.first_at, '{{seen}}') + interval '{POSTPONED_AT_MOST}',
      case when s.destination ->> 'type' = 'pull' then '{{seen}}' + interval '{CLAIMED_AT_MOST}' end
    ) end
  ) as latest
  from delivery_retry r
  join subscription s on s.subscription_id = r.subscription_id and s.deleted_at is null
  join {{outbox}} o on o.transaction_id = r.transaction_id and o.position = r.position
  left join schedule c on c.subscription_id = r.subscription_id
  where r.transaction_id >= '{{low}}' and r.transaction_id < '{{high}}'
) planned
where due_at > latest + interval '{CLOCKS_DIFFER_S} seconds'
group by subscription_id, name
""".replace("'{seen}'", "'{seen}'::timestamptz")  # noqa: S608 -- numbers of ours


def _with_times(query: str) -> str:
    """Return a query in which `{seen}` is a time, and `{claimed}` and `{sent}` are the last times of claims by then."""
    for name, most in (("claimed", CLAIMED_AT_MOST), ("sent", SENT_AT_MOST)):
        query = query.replace(f"{{{name}}}", f"'{{seen}}' + interval '{most}' + interval '{CLOCKS_DIFFER_S} seconds'")
    return query.replace("'{seen}'", "'{seen}'::timestamptz")


# The names of the day before are looked up. Without them, by its range of ids in the parents, the query would scan that
# day's log where statistics are old.
FOUND = "select to_regclass(%(outbox)s) is not null as outbox, to_regclass(%(receipt)s) is not null as receipt"
UNDEFINED_TABLE = "42P01"
# Entries of the log of the day before, its last ones, in which an earlier message of a key is looked for.
LOOKED_BACK = 100_000
# Receipts of the days after, the first ones and the last ones of each subscription, in which a later message of a key
# is looked for. A claim has up to 1,000 messages.
LOOKED_AHEAD = 10_000
# A subscription that is ordered by key sends the messages of a key one after another, as the relay and the claims of
# consumers have it (app/store/relay/retries.py, app/store/pull/ordered_claims.py): a message in delivery_retry waits
# for each earlier one of its key there that was tried or is due, with `hold` for each that is dead, and while a claim
# has one of the key. So the first of those that were tried or are due is the only one of its key that may be sent:
# `heads`, one descent of delivery_retry_key for each key. It is ready from its due time, or since the last earlier
# message of its key was settled: in memory, or in a claim, the worker may have had many of them. If the subscription
# had `hold` before, a dead letter has kept the key back until that change, `released`. A claim for longer than the
# service makes any keeps nothing back: it would hide messages that are never sent.
#
# Of a subscription whose consumers claim, any message of the key that a consumer has keeps the key back, a later one
# too: `leased` in delivery_retry, `held` in a claim, each until its time is over. A claim without keys is from a time
# when the subscription was not ordered. When a consumer gave a later one back is not on record: at the latest when that
# one is due, `returned`. A later one may be of a later day: `ahead` has the receipts of those days, by
# receipt_by_offset, that are newer than the head's due time, and looks up their keys.
#
# Without a head the log is not scanned. Served by dead_letter_key, and one scan of the day's log and of its receipts;
# pull_claim is small.
READY = _with_times("""
with keys as materialized (
  select r.subscription_id, r.replay, r.key, s.on_dead, s.pulled, max(r.leased_until) filter (
      where s.pulled and r.leased_until <= {claimed}
    ) as leased, max(r.due_at) filter (
      where s.pulled and r.first_at is not null and r.leased_until is null and r.due_at <= {claimed}
    ) as returned
  from delivery_retry r
  join (
    select subscription_id, on_dead, coalesce(destination ->> 'type' = 'pull', false) as pulled
    from subscription where ordered = 'key' and deleted_at is null
  ) s on s.subscription_id = r.subscription_id
  where r.key is not null
  group by 1, 2, 3, 4, 5
  having bool_or(r.transaction_id >= '{low}' and r.transaction_id < '{high}' and r.due_at <= '{seen}')
), held as materialized (
  select c.subscription_id, m.key, max(c.held_until) as until
  from pull_claim c cross join lateral unnest(c.keys) with ordinality m (key, n)
  where m.n <> all(c.settled) and m.key is not null and c.held_until <= {claimed}
  group by 1, 2
), heads as materialized (
  select k.*, b.transaction_id, b.position, b."offset", b.due_at, m.until
  from keys k
  left join held m on k.replay = 0 and m.subscription_id = k.subscription_id and m.key = k.key
  cross join lateral (
    select r.transaction_id, r.position, r."offset", r.due_at, r.leased_until
    from delivery_retry r
    where r.subscription_id = k.subscription_id and r.replay = k.replay and r.key = k.key
      and (r.first_at is not null or r.due_at <= '{seen}')
    order by r."offset" limit 1
  ) b
  where b.transaction_id >= '{low}' and b.transaction_id < '{high}' and b.due_at <= '{seen}'
    and (b.leased_until between '{seen}' and case when k.pulled then {claimed} else {sent} end) is not true
    and (k.leased is null or k.leased <= '{seen}') and (m.until is null or m.until <= '{seen}')
    and not (k.replay = 0 and k.subscription_id in (
      select subscription_id from pull_claim where keys is null and held_until > '{seen}' and held_until <= {claimed}
    ))
    and not (k.on_dead = 'hold' and exists (
      select from dead_letter x where x.subscription_id = k.subscription_id and x.replay = k.replay and x.key = k.key
        and x."offset" < b."offset"
    ))
), released as materialized (
  select subscription_id, max(at) as at from (
    select *, lag(on_dead) over (partition by subscription_id order by version_id) = 'hold' as held
    from subscription_version
  ) version
  where held and on_dead <> 'hold' group by 1
), logged as materialized ({logged}
), ahead as materialized (
  select w.subscription_id, w.replay, r.transaction_id, r.position, r.settled_at as at
  from (select subscription_id, replay, min(due_at) as due_at from heads where pulled group by 1, 2) w
  cross join lateral ({ahead}
  ) r
  where r.settled_at > w.due_at
), settled as materialized (
  select subscription_id, replay, key, max(at) as at from (
    select l.subscription_id, l.replay, l.key, r.at
    from logged l join ({receipts}
    ) r on r.transaction_id = l.transaction_id and r.position = l.position
      and r.subscription_id = l.subscription_id and r.replay = l.replay
    union all
    select a.subscription_id, a.replay, o.key, a.at
    from ahead a cross join lateral (
      select o.key from outbox o where o.transaction_id = a.transaction_id and o.position = a.position offset 0
    ) o
  ) e
  group by 1, 2, 3
)
select h.transaction_id::text, h.position, h.subscription_id, h.replay, h."offset",
  to_char(greatest(h.due_at, h.leased, h.returned, h.until, s.at, (
    select max(greatest(x.died_at, case when x."offset" < h."offset" then e.at end)) from dead_letter x
    where x.subscription_id = h.subscription_id and x.replay = h.replay and x.key = h.key
      and (x."offset" < h."offset" or h.pulled and x.reason not in ('expired', 'backlog', 'day_left'))
  )) at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') as ready_at
from heads h left join settled s on s.subscription_id = h.subscription_id and s.replay = h.replay and s.key = h.key
left join released e on e.subscription_id = h.subscription_id
""")
LOGGED = """
  select h.subscription_id, h.replay, h.key, o.transaction_id, o.position
  from heads h join {outbox} o on o.key = h.key and (h.pulled or o."offset" < h."offset")"""
# Served by outbox_by_offset. With a bound at each end Postgres expects few entries, and does not scan the log.
LOGGED_BEFORE = f"""
  union all{LOGGED}
  where o."offset" > (select max("offset") from {{outbox}}) - {LOOKED_BACK}
    and o."offset" <= (select max("offset") from {{outbox}})"""  # noqa: S608 -- a number of ours
AHEAD = f"""(
    select r.transaction_id, r.position, r.settled_at from receipt r
    where r.subscription_id = w.subscription_id and r.replay = w.replay and r.transaction_id >= '{{{{high}}}}'
    order by r."offset" {{order}} limit {LOOKED_AHEAD}
  )"""  # noqa: S608 -- a number of ours
RECEIPTS = """
    select transaction_id, position, subscription_id, replay, settled_at as at from {receipt}"""
# A person may have dropped a dead letter of a day that accepts no receipt any more.
DROPPED = """
    union all
    select transaction_id, position, subscription_id, replay, at from redelivery where what = 'dropped'"""
# How many keys there are is not known before they are read: without statistics Postgres expects one, and would read the
# log once for each. The descents for each key and the look-ups of dead letters stay what they are. For the same reason
# `logged` is read before the receipts: of their columns the subscription alone would join each key with each receipt.
# A merge would use that column alone, too. The receipts of later days come in the order of their index: to sort them,
# all of the subscription would be read.
PLANNED = ("set local enable_nestloop = off", "set local enable_mergejoin = off", "set local enable_sort = off")


def write_never_due(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the subscriptions with such retries of the day (schemas.NEVER_DUE) to files in `directory`; return their
    number.

    Without any, there is no directory. Raises copy.FAILURES.
    """
    return write_found(
        spark,
        snapshot,
        day,
        NEVER_DUE,
        directory,
        rows_of,
        whole=True,
    )


def write_ready(spark: SparkSession, snapshot: Snapshot, day: Day, directory: str) -> int:
    """Write the day's retries that are the next message of their key, and since when (schemas.READY_RETRY), to files in
    `directory`; return their number.

    Earlier messages of the key are those of the day, and the last of the day before. Later ones, of a subscription
    whose consumers claim, are those of the day, and of some receipts of later days. Without any, there is no
    directory. Raises copy.FAILURES.
    """
    try:
        return _write(spark, snapshot, day, ready_query(snapshot, day), directory)
    except dbapi.Error as error:
        if error.sqlstate != UNDEFINED_TABLE:
            raise
    # Upkeep drops all tables of a day at once, and dropped those of the day before since their names were looked up.
    # Nothing was written yet. The snapshot's session may still know the names, so they are not looked up again.
    return _write(spark, snapshot, day, _query(LOGGED, RECEIPTS), directory)


def _write(spark: SparkSession, snapshot: Snapshot, day: Day, query: str, directory: str) -> int:
    return write_found(spark, snapshot, day, query, directory, rows_of, whole=True, planned=PLANNED)


def ready_query(snapshot: Snapshot, day: Day) -> str:
    """Return write_ready's query, for write_found. It needs PLANNED.

    It names the tables of the day before that exist now. The run does not lock them.
    """
    logged, receipts = LOGGED, RECEIPTS
    before = {table: partition_name(table, day.day - timedelta(days=1)) for table in ("outbox", "receipt")}
    [found] = snapshot.rows(FOUND, before)
    if found["outbox"]:
        logged += LOGGED_BEFORE.format(**before)
    if found["receipt"]:
        receipts += f"\n    union all{RECEIPTS.format(**before)}"
    return _query(logged, receipts)


def _query(logged: str, receipts: str) -> str:
    ahead = "\n  union\n  ".join(AHEAD.format(order=order) for order in ("asc", "desc"))
    whole = READY.replace("{logged}", logged).replace("{receipts}", receipts + DROPPED)
    return whole.replace("{ahead}", ahead)
