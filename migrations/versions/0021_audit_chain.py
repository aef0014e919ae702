"""Chain the rows of the audit: each has the digest of its content and of the row before it."""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

UP = (
    "ALTER TABLE audit ADD COLUMN place BIGINT, ADD COLUMN digest BYTEA",
    "CREATE UNIQUE INDEX audit_place ON audit (place)",
    """
CREATE TABLE audit_chain (
        one BOOLEAN DEFAULT true NOT NULL,
        place BIGINT NOT NULL,
        digest BYTEA NOT NULL,
        forgotten_place BIGINT NOT NULL,
        forgotten_digest BYTEA NOT NULL,
        PRIMARY KEY (one),
        CONSTRAINT audit_chain_one CHECK (one)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    "INSERT INTO audit_chain VALUES (true, 0, '', 0, '')",
    # A trigger chains the rows of every program and of processes of an earlier version. It runs at the commit, when
    # every other lock is held already: so the lock on the chain is the last one, and lasts as long as the commit. It
    # runs with the rights of the owner, so that a role needs no more than to insert. spark/sources/audit_chain.py
    # computes the same digest. Without the row of audit_chain the chain goes on from its last row, so no act fails.
    """
CREATE FUNCTION chain_audit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
  head audit_chain;
  made bytea;
BEGIN
  SELECT * INTO head FROM audit_chain FOR UPDATE;
  IF NOT FOUND THEN
    INSERT INTO audit_chain
    SELECT true, coalesce(max(place), 0),
      coalesce((SELECT digest FROM audit ORDER BY place DESC NULLS LAST LIMIT 1), ''), 0, '' FROM audit
    RETURNING * INTO head;
  END IF;
  UPDATE audit SET place = head.place + 1, digest = sha256(convert_to(jsonb_build_array(
    head.place + 1, encode(head.digest, 'hex'), audit_id, to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US'),
    actor, key_id, role, what, target, detail)::text, 'UTF8'))
  WHERE audit_id = new.audit_id RETURNING digest INTO made;
  IF FOUND THEN
    UPDATE audit_chain SET place = head.place + 1, digest = made;
  END IF;
  RETURN NULL;
END
$$
""",
    """
CREATE CONSTRAINT TRIGGER audit_chain AFTER INSERT ON audit DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION chain_audit()
""",
)
DOWN = (
    "DROP TRIGGER audit_chain ON audit",
    "DROP FUNCTION chain_audit",
    "DROP TABLE audit_chain",
    "DROP INDEX audit_place",
    "ALTER TABLE audit DROP COLUMN place, DROP COLUMN digest",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
