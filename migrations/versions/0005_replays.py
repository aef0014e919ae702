"""Replays: a range of the outbox is delivered again to one subscription."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

UP = (
    """
CREATE TABLE replay (
        replay_id INTEGER GENERATED ALWAYS AS IDENTITY,
        subscription_id INTEGER NOT NULL,
        after BIGINT NOT NULL,
        until BIGINT NOT NULL,
        filters JSONB,
        "offset" BIGINT NOT NULL,
        state TEXT NOT NULL,
        actor TEXT,
        reason TEXT,
        created_at TIMESTAMP WITH TIME ZONE NOT NULL,
        moved_at TIMESTAMP WITH TIME ZONE NOT NULL,
        ended_at TIMESTAMP WITH TIME ZONE,
        PRIMARY KEY (replay_id),
        CONSTRAINT replay_state CHECK (state IN ('running', 'done', 'cancelled'))
    )
 WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02)
""",
    """CREATE INDEX replay_subscription ON replay (subscription_id, replay_id)""",
    """CREATE INDEX replay_running ON replay (subscription_id) WHERE state = 'running'""",
)
DOWN = ("DROP TABLE replay",)


def upgrade() -> None:
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)
