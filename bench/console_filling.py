"""Fill a database for the console: millions of transactions, a thousand subscriptions, and what people look for."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx

from app.database.connection import Connection
from app.finding_kinds import Kind
from app.ids import id_ms, lowest_id
from app.store.relay.leases import LeaseKind
from bench.payload import GROUP, TOPIC, half_body, message_of
from bench.services import Service
from bench.stage import connected
from bench.stored import DAYS, SEED_HALVES

# Of the subscriptions, so many take the topic of the stored transactions. The first has a receipt for each of them.
TAKING = 100
KEY, MESSAGES = "order-1030", 5
# Requests at once while things are created over HTTP.
TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Size:
    """How many rows of each kind."""

    transactions: int = 5_000_000
    subscriptions: int = 1000
    dead_letters: int = 100_000
    undecided: int = 20_000
    retries: int = 20_000
    audit: int = 20_000
    findings: int = 20_000


QUICK = Size(50_000, 120, 2000, 500, 300, 300, 300)


@dataclass(frozen=True, slots=True)
class Known:
    """What the pages of single things are asked for."""

    order: UUID
    stored: UUID
    doubted: UUID
    rolled_back: UUID
    dead: tuple[str, str]
    finding: int


# $1, $2: the range of ids. Every 40th is parked.
UNDECIDED = """
insert into check_back (transaction_id, producer_group, state, swept_at, next_check_at, parked_at, parked_reason)
select transaction_id, producer_group, case when n = 0 then 2 else 1 end, now(),
  case when n > 0 then now() + interval '1 min' end, case when n = 0 then now() end,
  case when n = 0 then 'max_checks answered unknown' end
from (
  select transaction_id, producer_group, row_number() over (order by transaction_id) % 40 as n from half
  where transaction_id >= $1 and transaction_id < $2
) h
"""
ROLLED_BACK = """
insert into op (transaction_id, verdict, source, actor, reason, decided_at)
select transaction_id, 2, n % 4, case when n % 4 = 3 then 'dana' end, 'out of stock', born_at from (
  select transaction_id, born_at, row_number() over (order by transaction_id) as n from half
  where transaction_id >= $1 and transaction_id < $2
) h
"""
# A late end for every 20th.
REFUSED = """
insert into attempt (transaction_id, kind, at, outcome, verdict, source, destination)
select transaction_id, 'refused', born_at, 'refused', 1, 0, producer_group from (
  select transaction_id, born_at, producer_group, row_number() over (order by transaction_id) as n from half
  where transaction_id >= $1 and transaction_id < $2
) h where n % 20 = 0
"""
RECEIPTS = """
insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms,
  status, settled_at)
select transaction_id, position, $1, "offset", 'delivered', 1, committed_at, 12 + "offset" % 40, 204, committed_at
from outbox where transaction_id >= $2 and transaction_id < $3
"""
# $1: how many; $2: the subscriptions. They have very different numbers. One of fifty errors has an id of its own.
DEAD = """
insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, first_at, reason,
  status, error, response, died_at)
select ($2::int[])[1 + (n * n) % cardinality($2::int[])], transaction_id, position, "offset", topic, key, 17,
  committed_at, case when n % 50 = 0 then 'rejected' else 'retries_exhausted' end, case when n % 3 > 0 then 500 end,
  case when n % 50 = 0 then 'request ' || md5(n::text) || ' failed: the warehouse database is read-only'
    when n % 3 = 0 then 'no connection to 10.0.' || n % 250 || '.7:443' else 'answered ' || 500 + n % 4 end,
  repeat('x', 300), now() - n * interval '1 s'
from (
  select o.*, row_number() over (order by "offset" desc) as n
  from (select * from outbox order by "offset" desc limit $1) o
) o
"""
ATTEMPTS = """
insert into attempt (transaction_id, kind, at, number, outcome, position, subscription_id, destination, status,
  duration_ms, error, response)
select transaction_id, 'delivery', died_at - n * interval '1 min', 18 - n, 'failed', position, subscription_id,
  'http://127.0.0.1:9/hook', status, 12, error, response from dead_letter, generate_series(1, 3) n
"""
RETRIES = """
insert into delivery_retry (subscription_id, transaction_id, position, "offset", topic, key, attempts, first_at, due_at,
  last_error, waiting_since)
select ($2::int[])[1 + n % cardinality($2::int[])], transaction_id, position, "offset", topic, key, 3, committed_at,
  now() + interval '1 h', 'answered ' || 500 + n % 4, committed_at
from (
  select o.*, row_number() over (order by "offset" desc) as n
  from (select * from outbox order by "offset" desc offset $3 limit $1) o
) o
"""
# The first is behind by messages of which each has a receipt. Every fifth has an open breaker.
CHECKPOINTS = """
update checkpoint c set "offset" = greatest(0, h.head - 12000 - 100 * t.n),
  opened_at = case when t.n % 5 = 4 then now() - t.n * interval '1 min' end,
  opened_because = case when t.n % 5 = 4 then 'answered 503' end, moved_at = now(), rated_at = now(), failed_per_s = 2
from unnest($1::int[]) with ordinality as t(subscription_id, n), (select max("offset") as head from outbox) h
where c.subscription_id = t.subscription_id
"""
LEASES = f"""
insert into lease (name, owner, epoch, expires_at, since, since_epoch)
select '{LeaseKind.SHARD}:' || subscription_id || ':' || shards || ':' || shard, 'worker-' || subscription_id % 4, 1,
  now() + interval '1 day', now(), 1 from checkpoint where subscription_id % 10 > 0
union all
select '{LeaseKind.WORKER}:worker-' || n, 'worker-' || n, 1, now() + interval '1 day', now(), 1
from generate_series(0, 3) n
"""
STOPPED = """
update subscription set state = case when subscription_id % 50 = 0 then 'disabled' else 'paused' end,
  state_reason = 'answered 410', updated_at = now() where subscription_id % 25 = 0
"""
SMALL_TABLES = (
    "insert into topic (name, first_seen_at) select 'order.' || n, now() from generate_series(1, 1000) n "
    "on conflict do nothing",
    "insert into api_key (name, prefix, digest, role, producer_groups, topics, subscriptions, created_at) "
    "select 'producer-' || n, 'hn_' || n, sha256(n::text::bytea), 'producer', '{*}', '{*}', '{}', now() "
    "from generate_series(1, 1000) n",
    "insert into stats_minute (minute, halves, commits, rollbacks, deliveries, failed_attempts, checks, in_doubt, "
    "parked, dead_letters, open_breakers, lag_messages, lag_s, database_bytes) "
    "select date_trunc('minute', now()) - n * interval '1 min', 1000 + n % 500, 900, 50, 3000, n % 90, 10, n % 100, 3, "
    "n % 5000, 2, n % 1000, n % 60, 5000000000 from generate_series(1, 43200) n",
    "insert into reconciliation_run (state, engine, source, seen_at, started_at, ended_at, days, open, new, resolved, "
    "seconds) select case when n % 7 = 0 then 'proved' else 'findings' end, 'local[2]', 'primary', at, at, at, "
    'array[at::date], 12, 3, 1, \'{"read": 8.5, "join": 12}\' '
    "from (select n, now() - (400 - n) * interval '1 day' as at from generate_series(1, 400) n) r",
    "insert into reconciliation_day (day, run_id, state, reconciled_at, counts, found, signature, figures) "
    "select ended_at::date, run_id, 'final', ended_at, '{\"half\": 700000, \"op\": 699000}', '{\"parked\": 3}', "
    "'{}', '{}' from reconciliation_run",
)
ORDER_RECEIPTS = """
insert into receipt (transaction_id, position, subscription_id, "offset", outcome, attempts, first_at, duration_ms,
  status, settled_at)
select transaction_id, position, s, "offset", 'delivered', 2, committed_at, 12, 204, committed_at
from outbox, unnest($2::int[]) s where transaction_id = $1
"""
ORDER_DEAD = """
insert into dead_letter (subscription_id, transaction_id, position, "offset", topic, key, attempts, first_at, reason,
  status, error, response, died_at)
select s, transaction_id, position, "offset", topic, key, 17, committed_at, 'retries_exhausted', 503, 'answered 503',
  'the warehouse database is read-only', committed_at
from outbox, unnest($2::int[]) s where transaction_id = $1
"""
FIRST = "select transaction_id from half where transaction_id >= $1 order by transaction_id limit 1"
NEWEST_DEAD = """
select s.name, d.transaction_id || '-' || d.position as message_id
from dead_letter d join subscription s on s.subscription_id = d.subscription_id order by d.died_at desc limit 1
"""
AUDIT = """
insert into audit (at, actor, role, what, target, detail)
select now() - ($1::int - n) * interval '1 min', 'dana', 'operator',
  (array['subscription.pause', 'subscription.resume', 'transaction.verdict'])[1 + n % 3], 'receiver-' || n % 100,
  '{"reason": "the warehouse is moved"}' from generate_series(1, $1::int) n
"""
FINDINGS = """
insert into finding (day, kind, subject, transaction_id, detail, first_run, first_seen_at, last_run, last_seen_at,
  resolved_run, resolved_at)
select current_date - n % 400, ($2::text[])[1 + n % cardinality($2::text[])], 'subject-' || n, null, '{}', 1, now(), 1,
  now(), case when n % 3 > 0 then 2 end, case when n % 3 > 0 then now() end from generate_series(1, $1::int) n
"""


async def configure(service: Service, count: int) -> None:
    """Create the producer groups and subscriptions over HTTP. Raises RuntimeError if one is refused."""
    asked: list[tuple[str, dict[str, Any]]] = [
        (f"/producer-groups/shop-{n:03}", {"check_urls": [f"http://127.0.0.1:9/check/{n}"]}) for n in range(100)
    ]
    for n in range(count):
        body: dict[str, Any] = {
            "topics": [TOPIC if n < TAKING else f"{TOPIC}.{n}"],
            "destination": {"type": "webhook", "url": f"http://127.0.0.1:9/hook/{n}"},
            "ordered": "key" if n % 2 else "none",
        }
        asked.append((f"/subscriptions/receiver-{n:03}", body))
    turns = asyncio.Semaphore(TOGETHER)
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as client:

        async def put(path: str, body: dict[str, Any]) -> None:
            async with turns:
                answer = await client.put(path, json=body)
            if answer.is_error:
                raise RuntimeError(f"PUT {path}: {answer.status_code} {answer.text}")

        await asyncio.gather(*(put(path, body) for path, body in asked))


async def fill(service: Service, dsn: str, size: Size) -> Known:
    """Add what the transactions of `bench.stored.seed` do not have: undecided ones, deliveries, and small tables."""
    async with connected(dsn) as connection:
        await connection.execute("set synchronous_commit = off")
        taking = [
            row[0]
            for row in await connection.fetch(
                "select subscription_id from subscription where $1 = any(topics) and name like 'receiver-%' "
                "order by name",
                TOPIC,
            )
        ]
        await _receipts(connection, taking[0])
        await connection.execute(DEAD, size.dead_letters, taking[1:], timeout=600)
        await connection.execute(RETRIES, size.retries, taking[1:20], size.dead_letters, timeout=600)
        undecided = await _undecided(connection, size)
        await connection.execute(CHECKPOINTS, taking)
        await connection.execute(STOPPED)
        await connection.execute(LEASES)
        for statement in SMALL_TABLES:
            await connection.execute(statement)
        await connection.execute(AUDIT, size.audit, timeout=600)
        await connection.execute(FINDINGS, size.findings, [kind.value for kind in Kind])
        order = await _order(service, connection, taking)
        await connection.execute(ATTEMPTS, timeout=600)
        await connection.execute("vacuum (analyze)", timeout=1200)
        await connection.execute("checkpoint")
        newest = await connection.fetchrow(NEWEST_DEAD)
        assert newest is not None
        return Known(
            order=order,
            stored=await connection.fetchval(FIRST, UUID(int=0)),
            dead=(newest["name"], newest["message_id"]),
            finding=await connection.fetchval("select max(finding_id) from finding"),
            **undecided,
        )


async def _receipts(connection: Connection, subscription_id: int) -> None:
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    for ago in range(DAYS):
        low, high = (lowest_id(today + timedelta(days=more - ago)) for more in (0, 1))
        await connection.execute(RECEIPTS, subscription_id, low, high, timeout=600)


async def _undecided(connection: Connection, size: Size) -> dict[str, UUID]:
    """Store halves of the last minutes: in doubt and parked, rolled back, and fresh ones. Return one of each."""
    now = datetime.now(UTC)
    doubted, rolled_back, fresh, end = (now - timedelta(seconds=ago) for ago in (580, 380, 180, 5))
    for begin, until in ((doubted, rolled_back), (rolled_back, fresh), (fresh, end)):
        await _halves(connection, begin, until, size.undecided)
    await connection.execute(UNDECIDED, lowest_id(doubted), lowest_id(rolled_back))
    for statement in (ROLLED_BACK, REFUSED):
        await connection.execute(statement, lowest_id(rolled_back), lowest_id(fresh))
    begins = {"doubted": doubted, "rolled_back": rolled_back}
    return {name: await connection.fetchval(FIRST, lowest_id(at)) for name, at in begins.items()}


async def _halves(connection: Connection, begin: datetime, until: datetime, count: int) -> None:
    low, high = (id_ms(lowest_id(at)) for at in (begin, until))
    body = message_of(half_body())
    await connection.execute(SEED_HALVES, low, (high - low) / count, count, GROUP, TOPIC, body, timeout=600)


async def _order(service: Service, connection: Connection, taking: list[int]) -> UUID:
    """Commit order 1030 over HTTP, and store its deliveries. Raises RuntimeError if it is refused."""
    messages = [{"topic": TOPIC, "key": KEY, "body": {"order": 1030, "part": part}} for part in range(MESSAGES)]
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as client:
        answer = await client.post("/messages", json={"producer_group": GROUP, "messages": messages})
    if answer.is_error:
        raise RuntimeError(f"POST /messages: {answer.status_code} {answer.text}")
    order = UUID(answer.json()["transaction_id"])
    third = len(taking) // 3
    await connection.execute(ORDER_RECEIPTS, order, taking[:third])
    await connection.execute(ORDER_DEAD, order, taking[third : 2 * third])
    return order
