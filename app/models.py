"""The tables in SQLAlchemy Core. Migrations create them; a test verifies that both agree.

Big tables are append-only and partitioned by transaction_id (a UUIDv7, so a partition is a day). Mutable tables are
small.
"""

from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Date,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

metadata = MetaData()
Time = DateTime(timezone=True)

# CACHE 1: a session with cached offsets would assign old ones after consumers saw newer ones.
outbox_offset = Sequence("outbox_offset", metadata=metadata, cache=1)
attempt_id = Sequence("attempt_id", metadata=metadata)
# Numbers the claims of consumers from the log.
pull_claim_id = Sequence("pull_claim_id", metadata=metadata)

DAY_TABLES = ("half", "op", "outbox", "receipt", "attempt")

_BY_DAY: dict[str, Any] = {"postgresql_partition_by": "RANGE (transaction_id)"}

half = Table(
    "half",
    metadata,
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("producer_group", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("tag", Text),
    Column("headers", JSONB),
    Column("content_type", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    # SHA-256 of the body, so that the nightly proof compares content without reading it.
    Column("body_digest", LargeBinary, nullable=False),
    Column("deliver_after_s", Double),
    Column("born_at", Time, nullable=False),
    Column("first_check_at", Time, nullable=False),
    # On position 0 only, except `traceparent`; `digest` is SHA-256 over the whole decoded request:
    Column("digest", LargeBinary),
    Column("context", JSONB),
    Column("policy", JSONB),
    # W3C `traceparent`, and after a space `tracestate` if there was one.
    Column("traceparent", Text),
    Column("reissued_from", Uuid),
    PrimaryKeyConstraint("transaction_id", "position"),
    Index("half_first_check", "first_check_at", postgresql_where=text('"position" = 0')),
    Index("half_key", "key", "transaction_id", postgresql_where=text("key IS NOT NULL")),
    **_BY_DAY,
)

op = Table(
    "op",
    metadata,
    Column("transaction_id", Uuid, nullable=False),
    Column("verdict", SmallInteger, nullable=False),
    Column("source", SmallInteger, nullable=False),
    Column("actor", Text),
    Column("reason", Text),
    Column("decided_at", Time, nullable=False),
    # The primary key allows only one verdict for each transaction.
    PrimaryKeyConstraint("transaction_id"),
    CheckConstraint("verdict IN (1, 2)", name="op_verdict"),
    CheckConstraint("source BETWEEN 0 AND 3", name="op_source"),
    **_BY_DAY,
)

outbox = Table(
    "outbox",
    metadata,
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("tag", Text),
    Column("due_at", Time),
    Column("committed_at", Time, nullable=False),
    PrimaryKeyConstraint("transaction_id", "position"),
    Index("outbox_by_offset", "offset"),
    **_BY_DAY,
)

receipt = Table(
    "receipt",
    metadata,
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("subscription_id", Integer, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("first_at", Time, nullable=False),
    Column("duration_ms", Integer, nullable=False),
    Column("status", Integer),
    Column("digest", LargeBinary),
    Column("settled_at", Time, nullable=False),
    # 0: the live delivery; otherwise the replay that sent the message again.
    Column("replay", Integer, nullable=False, server_default=text("0")),
    PrimaryKeyConstraint("transaction_id", "position", "subscription_id", "replay"),
    Index("receipt_by_offset", "subscription_id", "replay", "offset"),
    **_BY_DAY,
)

attempt = Table(
    "attempt",
    metadata,
    Column("transaction_id", Uuid, nullable=False),
    Column("attempt_id", BigInteger, nullable=False, server_default=text("nextval('attempt_id')")),
    Column("kind", Text, nullable=False),
    Column("at", Time, nullable=False),
    Column("number", Integer),
    Column("outcome", Text, nullable=False),
    Column("position", SmallInteger),
    Column("subscription_id", Integer),
    Column("verdict", SmallInteger),
    Column("source", SmallInteger),
    Column("destination", Text),
    Column("status", Integer),
    Column("duration_ms", Integer),
    Column("error", Text),
    Column("response", Text),
    Column("replay", Integer),
    PrimaryKeyConstraint("transaction_id", "attempt_id"),
    CheckConstraint("kind IN ('check', 'delivery', 'refused', 'swept', 'parked')", name="attempt_kind"),
    # At most one refused end per transaction, verdict and source: a producer in a loop cannot fill the disk.
    Index(
        "attempt_refused",
        "transaction_id",
        "verdict",
        "source",
        unique=True,
        postgresql_where=text("kind = 'refused'"),
    ),
    **_BY_DAY,
)

reissue = Table(
    "reissue",
    metadata,
    # The primary key allows one reissue: a second click sends nothing twice.
    Column("transaction_id", Uuid, primary_key=True),
    Column("reissued_as", Uuid, nullable=False),
    Column("actor", Text),
    Column("reason", Text, nullable=False),
    Column("at", Time, nullable=False),
)

# The tables from here on are mutable and small: free space in each page and an eager vacuum keep updates cheap.
_MUTABLE: dict[str, Any] = {"postgresql_with": {"fillfactor": 50, "autovacuum_vacuum_scale_factor": 0.02}}

producer_group = Table(
    "producer_group",
    metadata,
    Column("name", Text, primary_key=True),
    Column("check_urls", ARRAY(Text), nullable=False),
    Column("immunity_s", Integer, nullable=False),
    Column("interval_s", Integer, nullable=False),
    Column("max_checks", Integer, nullable=False),
    Column("check_timeout_s", Integer, nullable=False),
    Column("unanswered_park_s", Integer, nullable=False),
    Column("on_exhausted", Text, nullable=False),
    Column("check_max_in_flight", Integer, nullable=False),
    Column("ping_interval_s", Integer, nullable=False),
    Column("secrets", JSONB, nullable=False),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time, nullable=False),
    # Kept as a tombstone, so that Halfnote can still ask about a half that raced the deletion.
    Column("deleted_at", Time),
    # Learned by check-back: how many checks may be in flight, and until when the group asked for no checks.
    Column("check_window", Integer, nullable=False),
    Column("held_until", Time),
    Column("next_ping_at", Time, nullable=False),
    # `claim`: producers may claim the group's checks, and it may have no check URL.
    Column("checks", Text, nullable=False, server_default=text("'call'")),
    # When a producer last claimed checks, within a few seconds.
    Column("claimed_at", Time),
    # One call of a check URL asks about many transactions.
    Column("batch_checks", Boolean, nullable=False, server_default=text("false")),
    # The last PUT, also one that changed nothing: it ends the time for which the group asked for no checks.
    Column("registered_at", Time),
    # A round asks all checks that were not answered when a producer started. When the last one began, and whether it is
    # complete: then `round_reached` is null. Earlier versions keep the place of a round in it.
    Column("round_began_at", Time),
    Column("round_reached", Time),
    Index("producer_group_round", "round_began_at", postgresql_where=text("round_reached IS NOT NULL")),
    CheckConstraint("checks IN ('call', 'claim')", name="producer_group_checks"),
    CheckConstraint("on_exhausted IN ('rollback', 'park')", name="producer_group_on_exhausted"),
    # Secrets are stored sealed (app/secrets/vault.py).
    CheckConstraint("jsonb_typeof(secrets) = 'object' OR secrets = '[]'", name="producer_group_sealed"),
)

check_url = Table(
    "check_url",
    metadata,
    Column("producer_group", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("last_ok_at", Time),
    Column("last_error_at", Time),
    Column("last_error", Text),
    PrimaryKeyConstraint("producer_group", "url"),
)

topic = Table(
    "topic",
    metadata,
    Column("name", Text, primary_key=True),
    # When a half first used the topic, or when it was declared.
    Column("first_seen_at", Time, nullable=False),
    # Null: not declared; HALFNOTE_TOPICS=declared accepts only declared topics.
    Column("declared_at", Time),
)

check_back = Table(
    "check_back",
    metadata,
    Column("transaction_id", Uuid, primary_key=True),
    Column("producer_group", Text, nullable=False),
    Column("state", SmallInteger, nullable=False),
    Column("swept_at", Time, nullable=False),
    # Asked: calls made, each with its own number in `webhook-id`. Answered: calls that count toward max_checks.
    Column("asked", Integer, nullable=False, server_default=text("0")),
    Column("answered", Integer, nullable=False, server_default=text("0")),
    Column("unanswered", Integer, nullable=False, server_default=text("0")),
    Column("unanswered_since", Time),
    # The number of the newest answered check, so that no check is counted twice.
    Column("last_answered", Integer, nullable=False, server_default=text("0")),
    # Null: no check is due (parked, until a person requests a check).
    Column("next_check_at", Time),
    Column("leased_until", Time),
    Column("lease_epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("parked_at", Time),
    Column("parked_reason", Text),
    # The check is out to a producer that claimed it while this is the lease's epoch; each later lease has another one.
    Column("claimed_epoch", BigInteger),
    Column("claimed_at", Time),
    # A check was asked for after the last claim, by a person or a registration: the next one does not wait.
    Column("asked_at", Time),
    # For when the last round asked for a check: a later round asks for the next one some seconds later, and those
    # first for which this was longest ago.
    Column("urged_at", Time),
    CheckConstraint("state IN (1, 2)", name="check_back_state"),
    Index("check_back_due", "producer_group", "next_check_at"),
    Index("check_back_leased", "producer_group", "leased_until", postgresql_where=text("leased_until IS NOT NULL")),
    Index(
        "check_back_urged",
        "producer_group",
        text("coalesce(urged_at, swept_at)"),
        postgresql_where=text("state = 1 AND unanswered > 0"),
    ),
    Index("check_back_claimed", "leased_until", postgresql_where=text("claimed_epoch = lease_epoch")),
    **_MUTABLE,
)

sweep = Table(
    "sweep",
    metadata,
    Column("name", Text, primary_key=True),
    Column("reached", Time, nullable=False),
    Column("ran_at", Time, nullable=False),
)

subscription = Table(
    "subscription",
    metadata,
    Column("subscription_id", Integer, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("topics", ARRAY(Text), nullable=False),
    Column("filters", JSONB),
    Column("destination", JSONB, nullable=False),
    Column("secrets", JSONB, nullable=False),
    # The broker's credentials by name; never shown.
    Column("credentials", JSONB, nullable=False, server_default=text("'{}'")),
    Column("start", JSONB, nullable=False),
    Column("ordered", Text, nullable=False, server_default=text("'none'")),
    Column("on_dead", Text, nullable=False, server_default=text("'release'")),
    Column("shards", Integer, nullable=False, server_default=text("1")),
    Column("max_in_flight", Integer, nullable=False),
    Column("rate_per_s", Double),
    # The rate that the webhook's receiver granted in the consent handshake.
    Column("granted_per_s", Double),
    Column("timeout_s", Double, nullable=False),
    Column("retry", ARRAY(Double), nullable=False),
    Column("state", Text, nullable=False),
    Column("state_reason", Text),
    Column("created_at", Time, nullable=False),
    Column("updated_at", Time, nullable=False),
    Column("deleted_at", Time),
    # For the nightly proof: the offset before the first message, and when the topics and filters last changed.
    Column("started_after", BigInteger, nullable=False),
    Column("matches_since", Time, nullable=False),
    # Messages that wait longer, or that are more, become dead letters. Null: no limit.
    Column("expire_after_s", Double),
    Column("max_backlog", BigInteger),
    CheckConstraint("state IN ('active', 'paused', 'disabled')", name="subscription_state"),
    CheckConstraint("ordered IN ('none', 'key')", name="subscription_ordered"),
    CheckConstraint("on_dead IN ('release', 'hold')", name="subscription_on_dead"),
    # A webhook's own headers are in `credentials` (app/secrets/webhook_headers.py).
    CheckConstraint(
        "(jsonb_typeof(secrets) = 'object' OR secrets = '[]') AND (credentials ? 'sealed' OR credentials = '{}')"
        " AND NOT destination ? 'headers'",
        name="subscription_sealed",
    ),
    Index("subscription_name", "name", unique=True, postgresql_where=text("deleted_at IS NULL")),
)

# One row for each version of what a subscription takes and promises, in force from `at` on: append-only. A trigger on
# `subscription` writes it in the database transaction of the change. The nightly proof judges by it.
subscription_version = Table(
    "subscription_version",
    metadata,
    Column("version_id", BigInteger, Identity(always=True), primary_key=True),
    Column("subscription_id", Integer, nullable=False),
    Column("at", Time, nullable=False),
    Column("name", Text, nullable=False),
    Column("topics", ARRAY(Text), nullable=False),
    Column("filters", JSONB),
    Column("state", Text, nullable=False),
    Column("ordered", Text, nullable=False),
    Column("on_dead", Text, nullable=False),
    Column("shards", Integer, nullable=False),
    Column("max_in_flight", Integer, nullable=False),
    Column("rate_per_s", Double),
    Column("timeout_s", Double, nullable=False),
    Column("retry", ARRAY(Double), nullable=False),
    Column("expire_after_s", Double),
    Column("max_backlog", BigInteger),
    Column("started_after", BigInteger, nullable=False),
    Column("deleted_at", Time),
)

checkpoint = Table(
    "checkpoint",
    metadata,
    Column("subscription_id", Integer, nullable=False),
    # The number of shards in this layout: a holder of another layout finds no row of its own and writes nothing.
    Column("shards", Integer, nullable=False),
    Column("shard", Integer, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("moved_at", Time, nullable=False),
    # The breaker: when it opened, and why.
    Column("opened_at", Time),
    Column("opened_because", Text),
    # The holder's recent rates of deliveries and failures, and when it last wrote them.
    Column("delivered_per_s", Double, nullable=False, server_default=text("0")),
    Column("failed_per_s", Double, nullable=False, server_default=text("0")),
    Column("rated_at", Time),
    # Since when the destination only asks for pauses, and the end of the last one.
    Column("limited_since", Time),
    Column("paused_until", Time),
    PrimaryKeyConstraint("subscription_id", "shards", "shard"),
    **_MUTABLE,
)

# A second pass over a part of the log for one subscription, beside its live delivery.
replay = Table(
    "replay",
    metadata,
    Column("replay_id", Integer, Identity(always=True), primary_key=True),
    Column("subscription_id", Integer, nullable=False),
    Column("after", BigInteger, nullable=False),
    Column("until", BigInteger, nullable=False),
    Column("filters", JSONB),
    Column("offset", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("actor", Text),
    Column("reason", Text),
    Column("created_at", Time, nullable=False),
    Column("moved_at", Time, nullable=False),
    Column("ended_at", Time),
    # Kept while a dead letter of the replay is redelivered and the replay runs again.
    Column("cancelled_at", Time),
    CheckConstraint("state IN ('running', 'done', 'cancelled')", name="replay_state"),
    Index("replay_subscription", "subscription_id", "replay_id"),
    Index("replay_running", "subscription_id", postgresql_where=text("state = 'running'")),
    **_MUTABLE,
)

lease = Table(
    "lease",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("expires_at", Time, nullable=False),
    # When the owner claimed it, in which epoch. Null: claimed by an older version.
    Column("since", Time),
    Column("since_epoch", BigInteger),
    **_MUTABLE,
)

# One row, `all`: how many messages no subscription takes, of those up to an offset of the log.
routing_count = Table(
    "routing_count",
    metadata,
    Column("name", Text, primary_key=True),
    Column("offset", BigInteger, nullable=False),
    Column("unrouted", BigInteger, nullable=False),
    **_MUTABLE,
)


# Copies of the message's columns for rows that outlive its day; null while the day exists.
def _copy() -> list[Column[Any]]:
    return [
        Column("producer_group", Text),
        Column("tag", Text),
        Column("headers", JSONB),
        Column("content_type", Text),
        Column("body", LargeBinary),
        Column("body_digest", LargeBinary),
        Column("committed_at", Time),
    ]


delivery_retry = Table(
    "delivery_retry",
    metadata,
    Column("subscription_id", Integer, nullable=False),
    Column("replay", Integer, nullable=False, server_default=text("0")),
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("attempts", Integer, nullable=False),
    # Null: never tried. Then a future due time is the producer's delay, and a past one belongs to a message that
    # waits for others of its key.
    Column("first_at", Time),
    Column("due_at", Time, nullable=False),
    Column("leased_until", Time),
    Column("lease_epoch", BigInteger, nullable=False, server_default=text("0")),
    Column("last_error", Text),
    *_copy(),
    # The commit, the due time of a delayed message, the start of its replay, or when a person redelivered it.
    # Null: written by an older version.
    Column("waiting_since", Time),
    PrimaryKeyConstraint("subscription_id", "replay", "transaction_id", "position"),
    Index("delivery_retry_due", "subscription_id", "replay", "due_at"),
    Index("delivery_retry_offset", "subscription_id", "offset"),
    Index("delivery_retry_waiting", "subscription_id", "replay", text("COALESCE(waiting_since, due_at)")),
    Index("delivery_retry_tried", "subscription_id", "first_at", postgresql_where=text("first_at IS NOT NULL")),
    Index("delivery_retry_key", "subscription_id", "replay", "key", "offset", postgresql_where=text("key IS NOT NULL")),
    **_MUTABLE,
)

# A subscription of the type `pull`: its consumers have claimed what the log has up to `offset`, or it is in
# delivery_retry. The checkpoint follows, before the lowest offset that is claimed and not settled.
pull_cursor = Table(
    "pull_cursor",
    metadata,
    Column("subscription_id", Integer, primary_key=True, autoincrement=False),
    Column("offset", BigInteger, nullable=False),
    # Signs the handles of its messages.
    Column("handle_key", Uuid, nullable=False, server_default=text("gen_random_uuid()")),
    # Of a subscription with a rate: when its next message may be claimed.
    Column("paced_until", Time),
    # Of one whose messages can expire: when what waits was counted last, how many were too many, and what share of a
    # limit they used.
    Column("counted_at", Time),
    Column("excess", Integer, nullable=False, server_default=text("0")),
    Column("limit_used", Double),
    **_MUTABLE,
)

# One row for each claim of messages from the log, until all of them are settled: a row for each message would cost
# several times as much. What fails, or is held for long, goes to delivery_retry.
pull_claim = Table(
    "pull_claim",
    metadata,
    Column("subscription_id", Integer, nullable=False),
    Column("claim_id", BigInteger, nullable=False, server_default=text("nextval('pull_claim_id')")),
    # The lowest offset, and how many messages there are.
    Column("lowest", BigInteger, nullable=False),
    Column("size", SmallInteger, nullable=False),
    # The places of those that are settled or went to delivery_retry, from 1.
    Column("settled", ARRAY(SmallInteger), nullable=False, server_default=text("'{}'")),
    Column("claimed_at", Time, nullable=False),
    Column("held_until", Time, nullable=False),
    # When what is not settled goes to delivery_retry.
    Column("sweep_at", Time, nullable=False),
    Column("transaction_ids", ARRAY(Uuid), nullable=False),
    Column("positions", ARRAY(SmallInteger), nullable=False),
    # Of an ordered subscription. Null: the subscription was not ordered.
    Column("keys", ARRAY(Text)),
    PrimaryKeyConstraint("subscription_id", "claim_id"),
    Index("pull_claim_lowest", "subscription_id", "lowest"),
    Index("pull_claim_sweep", "sweep_at"),
    **_MUTABLE,
)

# Postponements: one row for each delivery, number of the attempt, outcome and cause. The first one is also a row of
# `attempt`, whose rows never change. This table is not archived.
postponement = Table(
    "postponement",
    metadata,
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("subscription_id", Integer, nullable=False),
    Column("replay", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("outcome", Text, nullable=False),
    # The status and the beginning of the error.
    Column("cause", Text, nullable=False),
    Column("first_at", Time, nullable=False),
    Column("last_at", Time, nullable=False),
    Column("times", Integer, nullable=False),
    PrimaryKeyConstraint("transaction_id", "position", "subscription_id", "replay", "number", "outcome", "cause"),
    **_MUTABLE,
)

dead_letter = Table(
    "dead_letter",
    metadata,
    Column("subscription_id", Integer, nullable=False),
    Column("replay", Integer, nullable=False, server_default=text("0")),
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("attempts", Integer, nullable=False),
    Column("first_at", Time),
    Column("reason", Text, nullable=False),
    Column("status", Integer),
    Column("error", Text),
    Column("response", Text),
    Column("died_at", Time, nullable=False),
    *_copy(),
    PrimaryKeyConstraint("subscription_id", "replay", "transaction_id", "position"),
    Index("dead_letter_offset", "subscription_id", "offset"),
    Index("dead_letter_key", "subscription_id", "replay", "key", "offset", postgresql_where=text("key IS NOT NULL")),
    # For upkeep, which copies the message before its day is removed.
    Index("dead_letter_uncopied", "transaction_id", "position", postgresql_where=text("body IS NULL")),
    # For lists, newest first: for all subscriptions, and for one.
    Index("dead_letter_died", "died_at", "transaction_id", "position", "subscription_id", "replay"),
    Index("dead_letter_of", "subscription_id", "died_at", "transaction_id", "position", "replay"),
)

# Redelivered and dropped dead letters, with the person: the dead letter's own row is gone by then.
redelivery = Table(
    "redelivery",
    metadata,
    Column("redelivery_id", BigInteger, Identity(always=True), primary_key=True),
    Column("subscription_id", Integer, nullable=False),
    Column("replay", Integer, nullable=False),
    Column("transaction_id", Uuid, nullable=False),
    Column("position", SmallInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("what", Text, nullable=False),
    Column("actor", Text),
    Column("reason", Text),
    Column("at", Time, nullable=False),
    Column("died_at", Time, nullable=False),
    Column("died_because", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    CheckConstraint("what IN ('redelivered', 'dropped')", name="redelivery_what"),
    Index("redelivery_transaction", "transaction_id", "redelivery_id"),
    Index("redelivery_at", "at"),
)

# When each cause of an operational message was last announced, and how many were held back since.
# The newest one held back is kept, to be announced when the limit's interval is over.
announced = Table(
    "announced",
    metadata,
    Column("topic", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("at", Time, nullable=False),
    Column("held_back", Integer, nullable=False, server_default=text("0")),
    Column("key", Text),
    Column("body", LargeBinary),
    PrimaryKeyConstraint("topic", "cause"),
    **_MUTABLE,
)

day = Table(
    "day",
    metadata,
    Column("day", Date, primary_key=True),
    Column("low", Uuid, nullable=False),
    Column("high", Uuid, nullable=False),
    Column("state", Text, nullable=False),
    Column("decided", Boolean, nullable=False, server_default=text("false")),
    Column("archive", Text),
    # The causes that keep a day past its retention, from upkeep's last turn: in_doubt, parked,
    # undelivered:<subscription>, …
    Column("held", ARRAY(Text), nullable=False, server_default=text("'{}'")),
    Column("changed_at", Time, nullable=False),
    # The archive's rows, id ranges and digests by table. Compared with the tables before they are dropped.
    Column("archive_manifest", JSONB),
    Column("archived_at", Time),
    CheckConstraint("state IN ('open', 'archiving', 'gone')", name="day_state"),
    # Not by `low`: the rows of removed days stay, and almost every id is of one of the last days.
    Index("day_high", "high"),
)

# Only the nightly proof writes certificates. `document` is the exact text that the next certificate has the digest of.
day_certificate = Table(
    "day_certificate",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("day", Date, nullable=False),
    Column("run_id", BigInteger, nullable=False),
    Column("document", Text, nullable=False),
    Index("day_certificate_day", "day", unique=True),
)

service_switch = Table(
    "service_switch",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("changed_at", Time, nullable=False),
)

# Each change of a key also changes the switch `api_keys`, so that every process detects it.
api_key = Table(
    "api_key",
    metadata,
    Column("key_id", Integer, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False),
    # The key's first characters, for people to distinguish keys, and the SHA-256 of the whole key.
    Column("prefix", Text, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("role", Text, nullable=False),
    # Scopes: names, or prefixes with a `*`.
    Column("producer_groups", ARRAY(Text), nullable=False),
    Column("topics", ARRAY(Text), nullable=False),
    Column("subscriptions", ARRAY(Text), nullable=False),
    Column("rate_per_s", Double),
    Column("created_at", Time, nullable=False),
    Column("created_by", Text),
    # The key that this one replaces.
    Column("rotated_from", Integer),
    Column("expires_at", Time),
    Column("revoked_at", Time),
    # To the minute.
    Column("last_used_at", Time),
    # With the role `metrics`: the role is `viewer`.
    Column("is_viewer", Boolean, nullable=False, server_default=text("false")),
    # Whether answers have the bodies of messages; null: all roles but `viewer` read them.
    Column("bodies", Boolean),
    CheckConstraint("role IN ('producer', 'subscriber', 'operator', 'admin', 'metrics')", name="api_key_role"),
    Index("api_key_digest", "digest", unique=True),
    **_MUTABLE,
)

# Changes that people made: append-only.
audit = Table(
    "audit",
    metadata,
    Column("audit_id", BigInteger, Identity(always=True), primary_key=True),
    Column("at", Time, nullable=False),
    # The key's name, or the user of the command line; null: auth was off.
    Column("actor", Text),
    Column("key_id", Integer),
    Column("role", Text),
    # `subscription.pause` and similar, and its target.
    Column("what", Text, nullable=False),
    Column("target", Text),
    # The request, without bodies and secrets.
    Column("detail", JSONB, nullable=False),
    # A trigger chains each row at the commit: its place, from 1, and the digest of its content and of the row before.
    # Null: from before there was a chain.
    Column("place", BigInteger),
    Column("digest", LargeBinary),
    Index("audit_at", "at"),
    Index("audit_place", "place", unique=True),
    Index("audit_target", "target", "audit_id"),
)

# One row: the last place of the audit's chain, and the last one that was removed because of its age. With digests.
audit_chain = Table(
    "audit_chain",
    metadata,
    Column("one", Boolean, primary_key=True, server_default=text("true")),
    Column("place", BigInteger, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("forgotten_place", BigInteger, nullable=False),
    Column("forgotten_digest", LargeBinary, nullable=False),
    CheckConstraint("one", name="audit_chain_one"),
    **_MUTABLE,
)

# Since when the evidence of the nightly proof is complete: of `verdict`, by a migration; of `audit`, by retention.
evidence_since = Table(
    "evidence_since",
    metadata,
    Column("name", Text, primary_key=True),
    Column("at", Time, nullable=False),
)

# Values that the service and the nightly proof share, in seconds or counts; written when a database is migrated.
shared_rule = Table(
    "shared_rule",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Double, nullable=False),
)

# One row a minute, kept 30 days. Every process adds what it did; one worker sets what stood open (null: none has yet).
stats_minute = Table(
    "stats_minute",
    metadata,
    Column("minute", Time, primary_key=True),
    Column("halves", BigInteger, nullable=False, server_default=text("0")),
    Column("commits", BigInteger, nullable=False, server_default=text("0")),
    Column("rollbacks", BigInteger, nullable=False, server_default=text("0")),
    Column("deliveries", BigInteger, nullable=False, server_default=text("0")),
    Column("failed_attempts", BigInteger, nullable=False, server_default=text("0")),
    Column("checks", BigInteger, nullable=False, server_default=text("0")),
    Column("in_doubt", BigInteger),
    Column("parked", BigInteger),
    Column("dead_letters", BigInteger),
    Column("open_breakers", BigInteger),
    # Of the subscription whose oldest waiting message is the oldest.
    Column("lag_messages", BigInteger),
    Column("lag_s", Double),
    Column("database_bytes", BigInteger),
    **_MUTABLE,
)

# The nightly proof. It writes these in one database transaction at the end of a run.
reconciliation_run = Table(
    "reconciliation_run",
    metadata,
    Column("run_id", BigInteger, Identity(always=True), primary_key=True),
    Column("state", Text, nullable=False),
    # local[2], spark://…
    Column("engine", Text, nullable=False),
    Column("source", Text, nullable=False),
    # The time of the snapshot that was reconciled.
    Column("seen_at", Time),
    Column("started_at", Time, nullable=False),
    Column("ended_at", Time, nullable=False),
    Column("days", ARRAY(Date), nullable=False),
    # Findings of these days: open after the run, new in it, resolved by it.
    Column("open", Integer, nullable=False),
    Column("new", Integer, nullable=False),
    Column("resolved", Integer, nullable=False),
    # Seconds by stage.
    Column("seconds", JSONB, nullable=False),
    Column("error", Text),
    CheckConstraint("state IN ('proved', 'findings', 'failed')", name="reconciliation_run_state"),
    CheckConstraint("source IN ('primary', 'standby', 'archive')", name="reconciliation_run_source"),
)

reconciliation_day = Table(
    "reconciliation_day",
    metadata,
    Column("day", Date, primary_key=True),
    # The last run that examined the day.
    Column("run_id", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("reconciled_at", Time, nullable=False),
    # Rows by table; findings by kind, including those past the storage limit.
    Column("counts", JSONB, nullable=False),
    Column("found", JSONB, nullable=False),
    # Detects whether the day changed since.
    Column("signature", JSONB, nullable=False),
    # Figures for the report's plots.
    Column("figures", JSONB, nullable=False),
    # Counts by topic, group and subscription; what is usual is computed from them.
    Column("volumes", JSONB, nullable=False, server_default=text("'{}'")),
    # complete, agreed, timely, orderly: 0 to 100 each.
    Column("score", JSONB, nullable=False, server_default=text("'{}'")),
    CheckConstraint("state IN ('provisional', 'final')", name="reconciliation_day_state"),
)

finding = Table(
    "finding",
    metadata,
    Column("finding_id", BigInteger, Identity(always=True), primary_key=True),
    Column("day", Date, nullable=False),
    Column("kind", Text, nullable=False),
    # A transaction's, message's or delivery's id, a topic or a producer group; unique for each day and kind.
    Column("subject", Text, nullable=False),
    Column("transaction_id", Uuid),
    Column("position", SmallInteger),
    Column("subscription_id", Integer),
    Column("producer_group", Text),
    Column("detail", JSONB, nullable=False),
    Column("first_run", BigInteger, nullable=False),
    Column("first_seen_at", Time, nullable=False),
    Column("last_run", BigInteger, nullable=False),
    Column("last_seen_at", Time, nullable=False),
    Column("resolved_run", BigInteger),
    Column("resolved_at", Time),
    # Null: not announced yet.
    Column("announced_at", Time),
    Index("finding_subject", "day", "kind", "subject", unique=True),
    Index("finding_open", "day", "kind", postgresql_where=text("resolved_at IS NULL")),
    Index(
        "finding_unannounced",
        "finding_id",
        postgresql_where=text("announced_at IS NULL AND resolved_at IS NULL"),
    ),
)
