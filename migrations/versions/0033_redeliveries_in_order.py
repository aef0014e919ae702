"""Count the redeliveries of a day, and read those of a transaction in their order, by an index alone."""

from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

# The build blocks only redeliveries and drops by people; what follows blocks reads too, and takes no time.
REPLACED = (
    "CREATE INDEX redelivery_built ON redelivery ({columns})",
    "DROP INDEX redelivery_transaction",
    "ALTER INDEX redelivery_built RENAME TO redelivery_transaction",
)


def upgrade() -> None:
    for statement in REPLACED:
        op.execute(statement.format(columns="transaction_id, redelivery_id"))


def downgrade() -> None:
    for statement in REPLACED:
        op.execute(statement.format(columns="transaction_id"))
