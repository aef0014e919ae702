"""Note since when each verdict of a check, of policy or of a person leaves evidence for the nightly proof."""

from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

# In seconds since 1970. A new database: from the beginning. Otherwise a day from now, because processes of an earlier
# version record verdicts until the upgrade is over.
UP = """
INSERT INTO shared_rule (name, value)
SELECT 'verdict_evidence_since',
    CASE WHEN EXISTS (SELECT FROM op) THEN extract(epoch FROM clock_timestamp() + interval '1 day') ELSE 0 END
"""
DOWN = "DELETE FROM shared_rule WHERE name = 'verdict_evidence_since'"


def upgrade() -> None:
    op.execute(UP)


def downgrade() -> None:
    op.execute(DOWN)
