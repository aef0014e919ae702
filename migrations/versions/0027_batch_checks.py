"""Let a producer group take many transactions in one check."""

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE producer_group ADD COLUMN batch_checks BOOLEAN DEFAULT false NOT NULL")


def downgrade() -> None:
    op.execute("ALTER TABLE producer_group DROP COLUMN batch_checks")
