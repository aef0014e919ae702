"""Store the count of messages without a subscription."""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE routing_count (
        name TEXT NOT NULL,
        "offset" BIGINT NOT NULL,
        unrouted BIGINT NOT NULL,
        PRIMARY KEY (name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    # Messages that are committed from now on are counted.
    """
INSERT INTO routing_count (name, "offset", unrouted)
SELECT 'all', coalesce(max("offset"), 0), 0 FROM outbox
""",
)
DOWN = ("DROP TABLE routing_count",)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
