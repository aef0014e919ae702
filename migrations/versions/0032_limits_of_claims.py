"""Let consumers' subscriptions have a rate and limits of what waits: what has been claimed and counted so far."""

from alembic import op

revision = "0032"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "ALTER TABLE pull_cursor ADD COLUMN paced_until TIMESTAMPTZ, ADD COLUMN counted_at TIMESTAMPTZ, "
        "ADD COLUMN excess INTEGER DEFAULT 0 NOT NULL, ADD COLUMN limit_used DOUBLE PRECISION"
    )


def downgrade() -> None:
    op.execute(
        "ALTER TABLE pull_cursor DROP COLUMN paced_until, DROP COLUMN counted_at, DROP COLUMN excess, "
        "DROP COLUMN limit_used"
    )
