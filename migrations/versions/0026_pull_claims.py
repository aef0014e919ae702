"""Keep what consumers have claimed of subscriptions of the type `pull`: a row for each claim, and a read cursor."""

from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

UP = (
    "CREATE SEQUENCE pull_claim_id",
    """
CREATE TABLE pull_cursor (
        subscription_id INTEGER NOT NULL,
        "offset" BIGINT NOT NULL,
        handle_key UUID DEFAULT gen_random_uuid() NOT NULL,
        PRIMARY KEY (subscription_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    """
CREATE TABLE pull_claim (
        subscription_id INTEGER NOT NULL,
        claim_id BIGINT DEFAULT nextval('pull_claim_id') NOT NULL,
        lowest BIGINT NOT NULL,
        size SMALLINT NOT NULL,
        settled SMALLINT[] DEFAULT '{}' NOT NULL,
        claimed_at TIMESTAMP WITH TIME ZONE NOT NULL,
        held_until TIMESTAMP WITH TIME ZONE NOT NULL,
        sweep_at TIMESTAMP WITH TIME ZONE NOT NULL,
        transaction_ids UUID[] NOT NULL,
        positions SMALLINT[] NOT NULL,
        PRIMARY KEY (subscription_id, claim_id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    "CREATE INDEX pull_claim_lowest ON pull_claim (subscription_id, lowest)",
    "CREATE INDEX pull_claim_sweep ON pull_claim (sweep_at)",
)
DOWN = ("DROP TABLE pull_claim", "DROP TABLE pull_cursor", "DROP SEQUENCE pull_claim_id")


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
