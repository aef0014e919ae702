"""Find the day of an id by the day's end: most ids are of the last days, and removed days keep rows."""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE INDEX day_high ON day (high)")
    op.execute("DROP INDEX day_low")


def downgrade() -> None:
    op.execute("CREATE INDEX day_low ON day (low)")
    op.execute("DROP INDEX day_high")
