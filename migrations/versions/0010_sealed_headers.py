"""Record whether the extra headers of webhooks are sealed. A database without subscriptions seals all of them."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

UP = (
    "ALTER TABLE sealing ADD headers BOOLEAN DEFAULT false NOT NULL",
    """
UPDATE sealing SET headers = true
WHERE NOT EXISTS (SELECT FROM producer_group) AND NOT EXISTS (SELECT FROM subscription)
""",
)
DOWN = ("ALTER TABLE sealing DROP headers",)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
