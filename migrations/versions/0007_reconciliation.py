"""The nightly proof: its findings for each day, and the facts about subscriptions and rules that it needs."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

UP = (
    # The proof checks a subscription's deliveries only from the time since which its topics and filters are unchanged.
    "ALTER TABLE subscription ADD started_after BIGINT, ADD matches_since TIMESTAMP WITH TIME ZONE",
    # The start of an existing subscription is unknown, so the proof covers it from now on.
    """
UPDATE subscription SET matches_since = now(), started_after = coalesce(
  (SELECT max("offset") FROM checkpoint c WHERE c.subscription_id = subscription.subscription_id), 0)
""",
    "ALTER TABLE subscription ALTER started_after SET NOT NULL, ALTER matches_since SET NOT NULL",
    "ALTER TABLE day ADD archive_manifest JSONB, ADD archived_at TIMESTAMP WITH TIME ZONE",
    """
CREATE TABLE shared_rule (
        name TEXT NOT NULL,
        value DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (name)
    )
""",
    """
CREATE TABLE reconciliation_run (
        run_id BIGINT GENERATED ALWAYS AS IDENTITY,
        state TEXT NOT NULL,
        engine TEXT NOT NULL,
        source TEXT NOT NULL,
        seen_at TIMESTAMP WITH TIME ZONE,
        started_at TIMESTAMP WITH TIME ZONE NOT NULL,
        ended_at TIMESTAMP WITH TIME ZONE NOT NULL,
        days DATE[] NOT NULL,
        open INTEGER NOT NULL,
        new INTEGER NOT NULL,
        resolved INTEGER NOT NULL,
        seconds JSONB NOT NULL,
        error TEXT,
        PRIMARY KEY (run_id),
        CONSTRAINT reconciliation_run_state CHECK (state IN ('proved', 'findings', 'failed')),
        CONSTRAINT reconciliation_run_source CHECK (source IN ('primary', 'standby', 'archive'))
    )
""",
    """
CREATE TABLE reconciliation_day (
        day DATE NOT NULL,
        run_id BIGINT NOT NULL,
        state TEXT NOT NULL,
        reconciled_at TIMESTAMP WITH TIME ZONE NOT NULL,
        counts JSONB NOT NULL,
        found JSONB NOT NULL,
        signature JSONB NOT NULL,
        figures JSONB NOT NULL,
        PRIMARY KEY (day),
        CONSTRAINT reconciliation_day_state CHECK (state IN ('provisional', 'final'))
    )
""",
    """
CREATE TABLE finding (
        finding_id BIGINT GENERATED ALWAYS AS IDENTITY,
        day DATE NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        transaction_id UUID,
        position SMALLINT,
        subscription_id INTEGER,
        producer_group TEXT,
        detail JSONB NOT NULL,
        first_run BIGINT NOT NULL,
        first_seen_at TIMESTAMP WITH TIME ZONE NOT NULL,
        last_run BIGINT NOT NULL,
        last_seen_at TIMESTAMP WITH TIME ZONE NOT NULL,
        resolved_run BIGINT,
        resolved_at TIMESTAMP WITH TIME ZONE,
        announced_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (finding_id)
    )
""",
    "CREATE UNIQUE INDEX finding_subject ON finding (day, kind, subject)",
    "CREATE INDEX finding_open ON finding (day, kind) WHERE resolved_at IS NULL",
    "CREATE INDEX finding_unannounced ON finding (finding_id) WHERE announced_at IS NULL AND resolved_at IS NULL",
)
DOWN = (
    "DROP TABLE finding",
    "DROP TABLE reconciliation_day",
    "DROP TABLE reconciliation_run",
    "DROP TABLE shared_rule",
    "ALTER TABLE day DROP archive_manifest, DROP archived_at",
    "ALTER TABLE subscription DROP started_after, DROP matches_since",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
