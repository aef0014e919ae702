"""Let producers claim the checks of their group, and mark the checks that are out to a producer."""

from alembic import op

revision = "0025"
down_revision = "0022"
branch_labels = None
depends_on = None

UP = (
    """
ALTER TABLE producer_group
    ADD COLUMN checks TEXT DEFAULT 'call' NOT NULL,
    ADD COLUMN claimed_at TIMESTAMP WITH TIME ZONE,
    ADD CONSTRAINT producer_group_checks CHECK (checks IN ('call', 'claim'))
""",
    """
ALTER TABLE check_back
    ADD COLUMN claimed_epoch BIGINT,
    ADD COLUMN claimed_at TIMESTAMP WITH TIME ZONE
""",
    "CREATE INDEX check_back_claimed ON check_back (leased_until) WHERE claimed_epoch = lease_epoch",
)
DOWN = (
    "DROP INDEX check_back_claimed",
    "ALTER TABLE check_back DROP COLUMN claimed_epoch, DROP COLUMN claimed_at",
    # A group without URLs is held (app/store/checkback/producer_groups.py).
    "UPDATE producer_group SET held_until = NULL WHERE held_until = 'infinity'",
    """
ALTER TABLE producer_group
    DROP CONSTRAINT producer_group_checks, DROP COLUMN checks, DROP COLUMN claimed_at
""",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
