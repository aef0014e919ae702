"""Keep a history of each subscription: one row for each version of what it takes and promises."""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

KEPT = (
    "name, topics, filters, state, ordered, on_dead, shards, max_in_flight, rate_per_s, timeout_s, retry,"
    " expire_after_s, max_backlog, started_after, deleted_at"
)
OF_NEW, OF_OLD = (", ".join(f"{row}.{name}" for name in KEPT.split(", ")) for row in ("new", "old"))

UP = (
    """
CREATE TABLE subscription_version (
        version_id BIGINT GENERATED ALWAYS AS IDENTITY,
        subscription_id INTEGER NOT NULL,
        at TIMESTAMP WITH TIME ZONE NOT NULL,
        name TEXT NOT NULL,
        topics TEXT[] NOT NULL,
        filters JSONB,
        state TEXT NOT NULL,
        ordered TEXT NOT NULL,
        on_dead TEXT NOT NULL,
        shards INTEGER NOT NULL,
        max_in_flight INTEGER NOT NULL,
        rate_per_s DOUBLE PRECISION,
        timeout_s DOUBLE PRECISION NOT NULL,
        retry DOUBLE PRECISION[] NOT NULL,
        expire_after_s DOUBLE PRECISION,
        max_backlog BIGINT,
        started_after BIGINT NOT NULL,
        deleted_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (version_id)
)
""",
    # A trigger records every change: those of each statement, of processes of an earlier version during a rolling
    # upgrade, and those by hand. A new subscription begins at its own time; a change happens now.
    f"""
CREATE FUNCTION record_subscription_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF tg_op = 'UPDATE' THEN
    IF ({OF_NEW}) IS NOT DISTINCT FROM ({OF_OLD}) THEN
      RETURN NULL;
    END IF;
  END IF;
  INSERT INTO subscription_version (subscription_id, at, {KEPT})
  VALUES (new.subscription_id, CASE tg_op WHEN 'INSERT' THEN new.created_at ELSE clock_timestamp() END, {OF_NEW});
  RETURN NULL;
END
$$
""",  # noqa: S608 -- constants
    """
CREATE TRIGGER subscription_version AFTER INSERT OR UPDATE ON subscription
    FOR EACH ROW EXECUTE FUNCTION record_subscription_version()
""",
    # The first version of what exists already: in force since its topics and filters last changed.
    f"""
INSERT INTO subscription_version (subscription_id, at, {KEPT})
SELECT subscription_id, matches_since, {KEPT} FROM subscription ORDER BY subscription_id
""",  # noqa: S608 -- constants
)
DOWN = (
    "DROP TRIGGER subscription_version ON subscription",
    "DROP FUNCTION record_subscription_version",
    "DROP TABLE subscription_version",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
