"""The record of redelivered and dropped dead letters, and of the announcements to people."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE redelivery (
        redelivery_id BIGINT GENERATED ALWAYS AS IDENTITY,
        subscription_id INTEGER NOT NULL,
        replay INTEGER NOT NULL,
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        "offset" BIGINT NOT NULL,
        what TEXT NOT NULL,
        actor TEXT,
        reason TEXT,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        died_at TIMESTAMP WITH TIME ZONE NOT NULL,
        died_because TEXT NOT NULL,
        attempts INTEGER NOT NULL,
        PRIMARY KEY (redelivery_id),
        CONSTRAINT redelivery_what CHECK (what IN ('redelivered', 'dropped'))
    )
""",
    """CREATE INDEX redelivery_at ON redelivery (at)""",
    """CREATE INDEX redelivery_transaction ON redelivery (transaction_id)""",
    """
CREATE TABLE announced (
        topic TEXT NOT NULL,
        cause TEXT NOT NULL,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        held_back INTEGER DEFAULT 0 NOT NULL,
        key TEXT,
        body BYTEA,
        PRIMARY KEY (topic, cause)
    )
 WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
)
DOWN = (
    "DROP TABLE announced",
    "DROP TABLE redelivery",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
