"""The transactions in doubt, the cursors of the sweeps, and the leases of loops."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE check_back (
        transaction_id UUID NOT NULL,
        producer_group TEXT NOT NULL,
        state SMALLINT NOT NULL,
        swept_at TIMESTAMP WITH TIME ZONE NOT NULL,
        asked INTEGER DEFAULT 0 NOT NULL,
        answered INTEGER DEFAULT 0 NOT NULL,
        unanswered INTEGER DEFAULT 0 NOT NULL,
        unanswered_since TIMESTAMP WITH TIME ZONE,
        last_answered INTEGER DEFAULT 0 NOT NULL,
        next_check_at TIMESTAMP WITH TIME ZONE,
        leased_until TIMESTAMP WITH TIME ZONE,
        lease_epoch BIGINT DEFAULT 0 NOT NULL,
        parked_at TIMESTAMP WITH TIME ZONE,
        parked_reason TEXT,
        PRIMARY KEY (transaction_id),
        CONSTRAINT check_back_state CHECK (state IN (1, 2))
    )
     WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    """CREATE INDEX check_back_due ON check_back (producer_group, next_check_at)""",
    """CREATE INDEX check_back_leased ON check_back (producer_group, leased_until) WHERE leased_until IS NOT NULL""",
    """
CREATE TABLE sweep (
        name TEXT NOT NULL,
        reached TIMESTAMP WITH TIME ZONE NOT NULL,
        ran_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (name)
    )
""",
    """
CREATE TABLE lease (
        name TEXT NOT NULL,
        owner TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (name)
    )
     WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
)
DOWN = (
    "DROP TABLE lease",
    "DROP TABLE sweep",
    "DROP TABLE check_back",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
