"""API keys, the audit of people's actions, and declared topics."""

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE api_key (
        key_id INTEGER GENERATED ALWAYS AS IDENTITY,
        name TEXT NOT NULL,
        prefix TEXT NOT NULL,
        digest BYTEA NOT NULL,
        role TEXT NOT NULL,
        producer_groups TEXT[] NOT NULL,
        topics TEXT[] NOT NULL,
        subscriptions TEXT[] NOT NULL,
        rate_per_s DOUBLE PRECISION,
        created_at TIMESTAMP WITH TIME ZONE NOT NULL,
        created_by TEXT,
        rotated_from INTEGER,
        expires_at TIMESTAMP WITH TIME ZONE,
        revoked_at TIMESTAMP WITH TIME ZONE,
        last_used_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (key_id),
        CONSTRAINT api_key_role CHECK (role IN ('producer', 'subscriber', 'operator', 'admin', 'metrics'))
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    "CREATE UNIQUE INDEX api_key_digest ON api_key (digest)",
    """
CREATE TABLE audit (
        audit_id BIGINT GENERATED ALWAYS AS IDENTITY,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        actor TEXT,
        key_id INTEGER,
        role TEXT,
        what TEXT NOT NULL,
        target TEXT,
        detail JSONB NOT NULL,
        PRIMARY KEY (audit_id)
    )
""",
    "CREATE INDEX audit_at ON audit (at)",
    "CREATE INDEX audit_target ON audit (target, audit_id)",
    # An older version of the service neither reads nor writes this column.
    "ALTER TABLE topic ADD declared_at TIMESTAMP WITH TIME ZONE",
)
DOWN = (
    "ALTER TABLE topic DROP declared_at",
    "DROP TABLE audit",
    "DROP TABLE api_key",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
