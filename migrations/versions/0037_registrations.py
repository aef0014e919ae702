"""Store when a group was last registered, and when a check was last asked for.

An answer to a check from before a registration must not hold the group again, and one from before a request for a check
must not put off that check.
"""

from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE producer_group ADD COLUMN registered_at TIMESTAMPTZ")
    op.execute("ALTER TABLE check_back ADD COLUMN asked_at TIMESTAMPTZ")


def downgrade() -> None:
    op.execute("ALTER TABLE check_back DROP COLUMN asked_at")
    op.execute("ALTER TABLE producer_group DROP COLUMN registered_at")
