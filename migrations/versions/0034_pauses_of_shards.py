"""Store the pause that a destination asked for with the shard."""

from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE checkpoint ADD COLUMN limited_since TIMESTAMPTZ, ADD COLUMN paused_until TIMESTAMPTZ")


def downgrade() -> None:
    op.execute("ALTER TABLE checkpoint DROP COLUMN limited_since, DROP COLUMN paused_until")
