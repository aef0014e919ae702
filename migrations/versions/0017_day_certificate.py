"""Keep a certificate of each final day: its exact text, in a chain."""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

UP = """
CREATE TABLE day_certificate (
        sequence BIGINT NOT NULL,
        day DATE NOT NULL,
        run_id BIGINT NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (sequence)
    )
"""


def upgrade() -> None:
    op.execute(UP)
    op.execute("CREATE UNIQUE INDEX day_certificate_day ON day_certificate (day)")


def downgrade() -> None:
    op.execute("DROP TABLE day_certificate")
