"""Index retries by their first attempt, to find the message of a subscription that has failed for longest."""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

UP = (
    """
CREATE INDEX delivery_retry_tried
    ON delivery_retry (subscription_id, first_at)
    WHERE first_at IS NOT NULL
""",
)
DOWN = ("DROP INDEX delivery_retry_tried",)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
