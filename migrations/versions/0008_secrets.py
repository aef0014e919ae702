"""Record since when secrets are sealed. A database without secrets seals every secret from the first one on."""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE sealing (
        one BOOLEAN NOT NULL,
        since TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (one),
        CONSTRAINT sealing_one CHECK (one)
    )
""",
    """
INSERT INTO sealing (one, since) SELECT true, clock_timestamp()
WHERE NOT EXISTS (SELECT FROM producer_group) AND NOT EXISTS (SELECT FROM subscription)
""",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    op.execute("DROP TABLE sealing")
