"""Keep figures by the minute: what was done, and what stood open."""

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE stats_minute (
        minute TIMESTAMP WITH TIME ZONE NOT NULL,
        halves BIGINT DEFAULT 0 NOT NULL,
        commits BIGINT DEFAULT 0 NOT NULL,
        rollbacks BIGINT DEFAULT 0 NOT NULL,
        deliveries BIGINT DEFAULT 0 NOT NULL,
        failed_attempts BIGINT DEFAULT 0 NOT NULL,
        checks BIGINT DEFAULT 0 NOT NULL,
        in_doubt BIGINT,
        parked BIGINT,
        dead_letters BIGINT,
        open_breakers BIGINT,
        lag_messages BIGINT,
        lag_s DOUBLE PRECISION,
        database_bytes BIGINT,
        PRIMARY KEY (minute)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
"""


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE stats_minute")
