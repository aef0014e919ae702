"""Producer groups, their check URLs, topics, and switches for operators."""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE producer_group (
        name TEXT NOT NULL,
        check_urls TEXT[] NOT NULL,
        immunity_s INTEGER NOT NULL,
        interval_s INTEGER NOT NULL,
        max_checks INTEGER NOT NULL,
        check_timeout_s INTEGER NOT NULL,
        unanswered_park_s INTEGER NOT NULL,
        on_exhausted TEXT NOT NULL,
        check_max_in_flight INTEGER NOT NULL,
        ping_interval_s INTEGER NOT NULL,
        secrets JSONB NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE NOT NULL,
        deleted_at TIMESTAMP WITH TIME ZONE,
        check_window INTEGER NOT NULL,
        held_until TIMESTAMP WITH TIME ZONE,
        next_ping_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (name),
        CONSTRAINT producer_group_on_exhausted CHECK (on_exhausted IN ('rollback', 'park'))
    )
""",
    """
CREATE TABLE check_url (
        producer_group TEXT NOT NULL,
        url TEXT NOT NULL,
        last_ok_at TIMESTAMP WITH TIME ZONE,
        last_error_at TIMESTAMP WITH TIME ZONE,
        last_error TEXT,
        PRIMARY KEY (producer_group, url)
    )
""",
    """
CREATE TABLE topic (
        name TEXT NOT NULL,
        first_seen_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (name)
    )
""",
    """
CREATE TABLE service_switch (
        name TEXT NOT NULL,
        value TEXT NOT NULL,
        changed_at TIMESTAMP WITH TIME ZONE NOT NULL,
        PRIMARY KEY (name)
    )
""",
)
DOWN = (
    "DROP TABLE service_switch",
    "DROP TABLE topic",
    "DROP TABLE check_url",
    "DROP TABLE producer_group",
)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
