"""Find the checks of a group for which a registration asked longest ago."""

from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE INDEX check_back_urged ON check_back (producer_group, coalesce(urged_at, swept_at)) "
        "WHERE state = 1 AND unanswered > 0"
    )


def downgrade() -> None:
    op.execute("DROP INDEX check_back_urged")
