"""The append-only tables, partitioned by day, and the table `day` with the state of each partition."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

UP = (
    """CREATE SEQUENCE outbox_offset CACHE 1""",
    """CREATE SEQUENCE attempt_id""",
    """
CREATE TABLE day (
        day DATE NOT NULL,
        low UUID NOT NULL,
        high UUID NOT NULL,
        state TEXT NOT NULL,
        decided BOOLEAN DEFAULT false NOT NULL,
        archive TEXT,
        held TEXT[] DEFAULT '{}' NOT NULL,
        changed_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (day),
        CONSTRAINT day_state CHECK (state IN ('open', 'archiving', 'gone'))
    )
""",
    """CREATE INDEX day_low ON day (low)""",
    """
CREATE TABLE half (
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        producer_group TEXT NOT NULL,
        topic TEXT NOT NULL,
        key TEXT,
        tag TEXT,
        headers JSONB,
        content_type TEXT NOT NULL,
        body BYTEA NOT NULL,
        body_digest BYTEA NOT NULL,
        deliver_after_s DOUBLE PRECISION,
        born_at TIMESTAMP WITH TIME ZONE NOT NULL,
        first_check_at TIMESTAMP WITH TIME ZONE NOT NULL,
        digest BYTEA,
        context JSONB,
        policy JSONB,
        traceparent TEXT,
        reissued_from UUID,
        PRIMARY KEY (transaction_id, position)
    )
     PARTITION BY RANGE (transaction_id)
""",
    """CREATE INDEX half_first_check ON half (first_check_at) WHERE "position" = 0""",
    """CREATE INDEX half_key ON half (key, transaction_id) WHERE key IS NOT NULL""",
    """
CREATE TABLE op (
        transaction_id UUID NOT NULL,
        verdict SMALLINT NOT NULL,
        source SMALLINT NOT NULL,
        actor TEXT,
        reason TEXT,
        decided_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (transaction_id),
        CONSTRAINT op_verdict CHECK (verdict IN (1, 2)),
        CONSTRAINT op_source CHECK (source BETWEEN 0 AND 3)
    )
     PARTITION BY RANGE (transaction_id)
""",
    """
CREATE TABLE outbox (
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        "offset" BIGINT NOT NULL,
        topic TEXT NOT NULL,
        key TEXT,
        tag TEXT,
        due_at TIMESTAMP WITH TIME ZONE,
        committed_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (transaction_id, position)
    )
     PARTITION BY RANGE (transaction_id)
""",
    """CREATE INDEX outbox_by_offset ON outbox ("offset")""",
    """
CREATE TABLE receipt (
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        subscription_id INTEGER NOT NULL,
        "offset" BIGINT NOT NULL,
        outcome TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        first_at TIMESTAMP WITH TIME ZONE NOT NULL,
        duration_ms INTEGER NOT NULL,
        status INTEGER,
        digest BYTEA,
        settled_at TIMESTAMP WITH TIME ZONE NOT NULL,
        replay INTEGER DEFAULT 0 NOT NULL,
        PRIMARY KEY (transaction_id, position, subscription_id, replay)
    )
     PARTITION BY RANGE (transaction_id)
""",
    """CREATE INDEX receipt_by_offset ON receipt (subscription_id, replay, "offset")""",
    """
CREATE TABLE attempt (
        transaction_id UUID NOT NULL,
        attempt_id BIGINT DEFAULT nextval('attempt_id') NOT NULL,
        kind TEXT NOT NULL,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        number INTEGER,
        outcome TEXT NOT NULL,
        position SMALLINT,
        subscription_id INTEGER,
        verdict SMALLINT,
        source SMALLINT,
        destination TEXT,
        status INTEGER,
        duration_ms INTEGER,
        error TEXT,
        response TEXT,
        replay INTEGER,
        PRIMARY KEY (transaction_id, attempt_id),
        CONSTRAINT attempt_kind CHECK (kind IN ('check', 'delivery', 'refused', 'swept', 'parked'))
    )
     PARTITION BY RANGE (transaction_id)
""",
    """CREATE UNIQUE INDEX attempt_refused ON attempt (transaction_id, verdict, source) WHERE kind = 'refused'""",
    """
CREATE TABLE reissue (
        transaction_id UUID NOT NULL,
        reissued_as UUID NOT NULL,
        actor TEXT,
        reason TEXT NOT NULL,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (transaction_id)
    )
""",
)
DOWN = (
    "DROP TABLE reissue",
    "DROP TABLE attempt",
    "DROP TABLE receipt",
    "DROP TABLE outbox",
    "DROP TABLE op",
    "DROP TABLE half",
    "DROP TABLE day",
    "DROP SEQUENCE attempt_id",
    "DROP SEQUENCE outbox_offset",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
