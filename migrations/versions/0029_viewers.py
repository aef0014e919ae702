"""Let keys be viewers', and give keys a permission for the bodies of messages."""

from alembic import op

revision = "0029"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE api_key ADD COLUMN is_viewer BOOLEAN DEFAULT false NOT NULL, ADD COLUMN bodies BOOLEAN")


def downgrade() -> None:
    op.execute("ALTER TABLE api_key DROP COLUMN is_viewer, DROP COLUMN bodies")
