"""SQL that reads the history of a transaction from each table. Every statement is keyed by id, so it reads one day."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from app.database.connection import Connection
from app.store.checkback.next_checks import NEXT_CHECK_AT
from app.store.coordinator.attempts import Attempt, latest_attempts, verdict_of
from app.store.coordinator.deliveries import ALL, DeliveryPlace, DeliveryRecord, DeliverySelection, read_deliveries
from app.verdicts import CHECK_BACK_STATE_OF, CheckBackState, DeadLetterAction, Source, Verdict

# What the scope of a key is compared with: the group, and the topic of one message once it is committed. One statement,
# so that it takes the same number of statements to refuse an id of another group and an id that does not exist. Primary
# keys only, one partition each. RECORD_ENDS says why the condition is `position < 1`.
OWNER = """
select h.producer_group, (
  select o.topic from outbox o where o.transaction_id = $1 and o.position = $2
) as published_topic
from half h where h.transaction_id = $1 and h.position < 1
"""

# Served by half's primary key in one partition. Bodies are not read.
STORED_MESSAGES = """
select position, producer_group, topic, key, tag, headers, content_type, deliver_after_s, born_at, first_check_at,
  context, reissued_from
from half where transaction_id = $1 order by position
"""

# One statement, so op and check_back are of the same moment. Primary keys only, one partition each. RECORD_ENDS says
# why the condition is `position < 1`.
RECORD = f"""
select o.verdict, o.source, o.actor, o.reason, o.decided_at,
  c.state as check_back, {NEXT_CHECK_AT} as next_check_at, c.parked_reason,
  r.reissued_as, r.at as reissued_at, r.actor as reissued_by, r.reason as reissue_reason
from (values ($1::uuid)) as t(transaction_id)
left join op o on o.transaction_id = t.transaction_id
left join check_back c on c.transaction_id = t.transaction_id
left join reissue r on r.transaction_id = t.transaction_id
left join half h on h.transaction_id = t.transaction_id and h.position < 1
"""  # noqa: S608 -- a constant

# Served by outbox's primary key in one partition.
PUBLISHED = """
select position, "offset", due_at, committed_at from outbox where transaction_id = $1 order by position
"""

# Served by redelivery_transaction. The latest ones: a person's script can redeliver a message again and again.
REDELIVERIES = """
select x.position, s.name as subscription, nullif(x.replay, 0) as replay, x.what, x.actor, x.reason, x.at,
  x.died_at, x.died_because, x.attempts
from (select * from redelivery where transaction_id = $1 order by redelivery_id desc limit $2) x
left join subscription s on s.subscription_id = x.subscription_id
order by x.redelivery_id
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """The producer group of a transaction, and the topic of one of its messages (None: it is not committed)."""

    producer_group: str
    published_topic: str | None


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message of a half without its body. `headers` and `context` are JSON text; only position 0 has a context."""

    position: int
    producer_group: str
    topic: str
    key: str | None
    tag: str | None
    headers: str | None
    content_type: str
    deliver_after_s: float | None
    born_at: datetime
    first_check_at: datetime
    context: str | None
    reissued_from: UUID | None


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of a transaction's op, check_back row and reissue. They are None if there is no such row.

    `next_check_at`: also of a half without an op whose check immunity is not over; no sooner than its group is held.
    """

    verdict: Verdict | None
    source: Source | None
    actor: str | None
    reason: str | None
    decided_at: datetime | None
    check_back: CheckBackState | None
    next_check_at: datetime | None
    parked_reason: str | None
    reissued_as: UUID | None
    reissued_at: datetime | None
    reissued_by: str | None
    reissue_reason: str | None


@dataclass(frozen=True, slots=True)
class Published:
    """The log entry of a committed message. `due_at` is set only if it was delayed."""

    position: int
    offset: int
    due_at: datetime | None
    committed_at: datetime


@dataclass(frozen=True, slots=True)
class Redelivery:
    """A person's action on a dead letter, with the time and reason of its death and its `attempts` until then.

    `subscription` None: its row is gone.
    """

    position: int
    subscription: str | None
    replay: int | None
    what: DeadLetterAction
    actor: str | None
    reason: str | None
    at: datetime
    died_at: datetime
    died_because: str
    attempts: int


@dataclass(frozen=True, slots=True)
class History:
    """The rows of one transaction; of attempts and redeliveries the latest ones, of deliveries the first.

    `more_below`: earlier attempts have ids below this one; None: there are none. `more_after`: further deliveries come
    after this place; None: there are none.
    """

    transaction_id: UUID
    messages: list[StoredMessage]
    record: Record
    published: list[Published]
    attempts: list[Attempt]
    more_below: int | None
    deliveries: list[DeliveryRecord]
    more_after: DeliveryPlace | None
    redeliveries: list[Redelivery]


async def read_owner(connection: Connection, transaction_id: UUID, position: int = 0) -> Owner | None:
    """Return whose transaction this is, and the topic of its message `position`; None if there is no such half."""
    row = await connection.fetchrow(OWNER, transaction_id, position)
    return None if row is None else Owner(**row)


async def read_history(
    connection: Connection, transaction_id: UUID, limit: int, selection: DeliverySelection = ALL
) -> History | None:
    """Return the history of a transaction in one snapshot; None if there is no such half.

    `limit`: the most attempts, and the most redeliveries. `selection`: the deliveries to read.
    """
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        messages = await read_messages(connection, transaction_id)
        if not messages:
            return None
        record = await read_record(connection, transaction_id)
        attempts, more_below = await latest_attempts(connection, transaction_id, limit)
        deliveries, more_after = await read_deliveries(connection, transaction_id, selection)
        return History(
            transaction_id,
            messages,
            record,
            [Published(**row) for row in await connection.fetch(PUBLISHED, transaction_id)],
            attempts,
            more_below,
            deliveries,
            more_after,
            [_redelivery(row) for row in await connection.fetch(REDELIVERIES, transaction_id, limit)],
        )


async def read_messages(connection: Connection, transaction_id: UUID) -> list[StoredMessage]:
    """Return the messages of a transaction without their bodies; none if there is no such half."""
    return [StoredMessage(**row) for row in await connection.fetch(STORED_MESSAGES, transaction_id)]


async def read_record(connection: Connection, transaction_id: UUID) -> Record:
    """Return the verdict of a transaction, and where check-back has it."""
    row: Any = await connection.fetchrow(RECORD, transaction_id)
    return Record(**{**row, **verdict_of(row), "check_back": CHECK_BACK_STATE_OF[row["check_back"]]})


def _redelivery(row: Any) -> Redelivery:
    return Redelivery(**{**row, "what": DeadLetterAction(row["what"])})
