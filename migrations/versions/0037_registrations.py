"""Store when a producer group was last registered: an answer to an earlier check must not hold the group again."""

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE producer_group ADD COLUMN registered_at TIMESTAMPTZ")


def downgrade() -> None:
    op.execute("ALTER TABLE producer_group DROP COLUMN registered_at")
