"""Count postponements in one row for each delivery, attempt and cause."""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE postponement (
        transaction_id UUID NOT NULL,
        position SMALLINT NOT NULL,
        subscription_id INTEGER NOT NULL,
        replay INTEGER NOT NULL,
        number INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        cause TEXT NOT NULL,
        first_at TIMESTAMP WITH TIME ZONE NOT NULL,
        last_at TIMESTAMP WITH TIME ZONE NOT NULL,
        times INTEGER NOT NULL,
        PRIMARY KEY (transaction_id, position, subscription_id, replay, number, outcome, cause)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
)
DOWN = ("DROP TABLE postponement",)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
