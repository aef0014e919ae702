"""Note since when each verdict of a check, of policy or of a person leaves evidence for the nightly proof."""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE evidence_since (
        name TEXT NOT NULL,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (name)
)
""",
    # A new database: from the beginning. Otherwise a day from now, because processes of an earlier version record
    # verdicts until the upgrade is over.
    """
INSERT INTO evidence_since (name, at)
SELECT 'verdict', CASE WHEN EXISTS (SELECT FROM op) THEN clock_timestamp() + interval '1 day' ELSE '-infinity' END
""",
)
DOWN = "DROP TABLE evidence_since"


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    op.execute(DOWN)
