"""Note the keys of the messages in a claim, for subscriptions with `ordered: key`."""

from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE pull_claim ADD COLUMN keys TEXT[]")


def downgrade() -> None:
    op.execute("ALTER TABLE pull_claim DROP COLUMN keys")
