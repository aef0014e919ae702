"""Let messages that wait too long for a subscription become dead letters: its limits, and since when a retry waits."""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

UP = (
    "ALTER TABLE subscription ADD COLUMN expire_after_s DOUBLE PRECISION",
    "ALTER TABLE subscription ADD COLUMN max_backlog BIGINT",
    "ALTER TABLE delivery_retry ADD COLUMN waiting_since TIMESTAMP WITH TIME ZONE",
    """
CREATE INDEX delivery_retry_waiting
    ON delivery_retry (subscription_id, replay, COALESCE(waiting_since, due_at))
""",
    """
CREATE INDEX dead_letter_uncopied
    ON dead_letter (transaction_id, position)
    WHERE body IS NULL
""",
)
DOWN = (
    "DROP INDEX dead_letter_uncopied",
    "DROP INDEX delivery_retry_waiting",
    "ALTER TABLE delivery_retry DROP COLUMN waiting_since",
    "ALTER TABLE subscription DROP COLUMN max_backlog",
    "ALTER TABLE subscription DROP COLUMN expire_after_s",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
