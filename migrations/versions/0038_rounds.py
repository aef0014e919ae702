"""Store how far a registration has come that asks the checks of a group which were not answered.

The request of the registration asks what it reaches in its time, and a worker goes on with the others, also after a
restart.
"""

from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("ALTER TABLE producer_group ADD COLUMN round_began_at TIMESTAMPTZ, ADD COLUMN round_reached TIMESTAMPTZ")
    op.execute("CREATE INDEX producer_group_round ON producer_group (round_began_at) WHERE round_reached IS NOT NULL")
    op.execute("ALTER TABLE check_back ADD COLUMN urged_at TIMESTAMPTZ")


def downgrade() -> None:
    op.execute("ALTER TABLE check_back DROP COLUMN urged_at")
    op.execute("ALTER TABLE producer_group DROP COLUMN round_began_at, DROP COLUMN round_reached")
