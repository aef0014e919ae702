"""Subscriptions, their checkpoints, retries and dead letters."""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE subscription (
        subscription_id INTEGER GENERATED ALWAYS AS IDENTITY,
        name TEXT NOT NULL,
        topics TEXT[] NOT NULL,
        filters JSONB,
        destination JSONB NOT NULL,
        secrets JSONB NOT NULL,
        credentials JSONB DEFAULT '{}' NOT NULL,
        start JSONB NOT NULL,
        ordered TEXT DEFAULT 'none' NOT NULL,
        on_dead TEXT DEFAULT 'release' NOT NULL,
        shards INTEGER DEFAULT 1 NOT NULL,
        max_in_flight INTEGER NOT NULL,
        rate_per_s DOUBLE PRECISION,
        granted_per_s DOUBLE PRECISION,
        timeout_s DOUBLE PRECISION NOT NULL,
        retry DOUBLE PRECISION[] NOT NULL,
        state TEXT NOT NULL,
        state_reason TEXT,
        created_at TIMESTAMP WITH TIME ZONE NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE NOT NULL,
        deleted_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (subscription_id),
        CONSTRAINT subscription_state CHECK (state IN ('active', 'paused', 'disabled')),
        CONSTRAINT subscription_ordered CHECK (ordered IN ('none', 'key')),
        CONSTRAINT subscription_on_dead CHECK (on_dead IN ('release', 'hold'))
    )
""",
    """CREATE UNIQUE INDEX subscription_name ON subscription (name) WHERE deleted_at IS NULL""",
    """
CREATE TABLE checkpoint (
        subscription_id INTEGER NOT NULL,
        shards INTEGER NOT NULL,
        shard INTEGER NOT NULL,
        "offset" BIGINT NOT NULL,
        moved_at TIMESTAMP WITH TIME ZONE NOT NULL,
        opened_at TIMESTAMP WITH TIME ZONE,
        opened_because TEXT,
        delivered_per_s DOUBLE PRECISION DEFAULT 0 NOT NULL,
        failed_per_s DOUBLE PRECISION DEFAULT 0 NOT NULL,
        rated_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (subscription_id, shards, shard)
    )
 WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    """
CREATE TABLE delivery_retry (
        subscription_id INTEGER NOT NULL,
        replay INTEGER DEFAULT 0 NOT NULL,
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        "offset" BIGINT NOT NULL,
        topic TEXT NOT NULL,
        key TEXT,
        attempts INTEGER NOT NULL,
        first_at TIMESTAMP WITH TIME ZONE,
        due_at TIMESTAMP WITH TIME ZONE NOT NULL,
        leased_until TIMESTAMP WITH TIME ZONE,
        lease_epoch BIGINT DEFAULT 0 NOT NULL,
        last_error TEXT,
        producer_group TEXT,
        tag TEXT,
        headers JSONB,
        content_type TEXT,
        body BYTEA,
        body_digest BYTEA,
        committed_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (subscription_id, replay, transaction_id, position)
    )
 WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    """CREATE INDEX delivery_retry_due ON delivery_retry (subscription_id, replay, due_at)""",
    """
CREATE INDEX delivery_retry_key
    ON delivery_retry (subscription_id, replay, key, "offset")
    WHERE key IS NOT NULL
""",
    """CREATE INDEX delivery_retry_offset ON delivery_retry (subscription_id, "offset")""",
    """
CREATE TABLE dead_letter (
        subscription_id INTEGER NOT NULL,
        replay INTEGER DEFAULT 0 NOT NULL,
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        "offset" BIGINT NOT NULL,
        topic TEXT NOT NULL,
        key TEXT,
        attempts INTEGER NOT NULL,
        first_at TIMESTAMP WITH TIME ZONE,
        reason TEXT NOT NULL,
        status INTEGER,
        error TEXT,
        response TEXT,
        died_at TIMESTAMP WITH TIME ZONE NOT NULL,
        producer_group TEXT,
        tag TEXT,
        headers JSONB,
        content_type TEXT,
        body BYTEA,
        body_digest BYTEA,
        committed_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (subscription_id, replay, transaction_id, position)
    )
""",
    """
CREATE INDEX dead_letter_died
    ON dead_letter (died_at, transaction_id, position, subscription_id, replay)
""",
    """
CREATE INDEX dead_letter_of
    ON dead_letter (subscription_id, died_at, transaction_id, position, replay)
""",
    """
CREATE INDEX dead_letter_key
    ON dead_letter (subscription_id, replay, key, "offset")
    WHERE key IS NOT NULL
""",
    """CREATE INDEX dead_letter_offset ON dead_letter (subscription_id, "offset")""",
)
DOWN = (
    "DROP TABLE dead_letter",
    "DROP TABLE delivery_retry",
    "DROP TABLE checkpoint",
    "DROP TABLE subscription",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
