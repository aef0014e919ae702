"""Keep how many messages each topic, group and subscription had on each day that was proved."""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE reconciliation_day ADD COLUMN volumes JSONB NOT NULL DEFAULT '{}'")


def downgrade() -> None:
    op.execute("ALTER TABLE reconciliation_day DROP COLUMN volumes")
