"""Let keys be viewers', give keys a permission for bodies, and leases the time since when they are held."""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE api_key ADD COLUMN is_viewer BOOLEAN DEFAULT false NOT NULL, ADD COLUMN bodies BOOLEAN")
    op.execute("ALTER TABLE lease ADD COLUMN since TIMESTAMPTZ, ADD COLUMN since_epoch BIGINT")


def downgrade() -> None:
    op.execute("ALTER TABLE api_key DROP COLUMN is_viewer, DROP COLUMN bodies")
    op.execute("ALTER TABLE lease DROP COLUMN since, DROP COLUMN since_epoch")
