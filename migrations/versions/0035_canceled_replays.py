"""Store with a replay when a person canceled it, also while a dead letter of it is redelivered."""

from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE replay ADD COLUMN cancelled_at TIMESTAMPTZ")
    op.execute("UPDATE replay SET cancelled_at = coalesce(ended_at, moved_at) WHERE state = 'cancelled'")


def downgrade() -> None:
    op.execute("ALTER TABLE replay DROP COLUMN cancelled_at")
