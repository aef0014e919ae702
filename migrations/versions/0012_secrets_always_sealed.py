"""Seal every secret that is still in plain text. From now on, constraints of the tables refuse plain text.

An older version that runs on the new schema cannot store secrets; see `OLDEST_SERVED` in app/migrate.py.
"""

import json
from pathlib import Path
from typing import Any

from alembic import context, op
from sqlalchemy import text

from app.database.connection import UnusableDatabase
from app.errors import SecretsUnreadable
from app.secrets.vault import CREDENTIALS, GROUP_SECRETS, SUBSCRIPTION_SECRETS, Vault, is_sealed

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

# The new constraints take these locks in any case. Taken first, they keep requests from writing plain text after the
# rows were sealed.
LOCK = "LOCK TABLE producer_group, subscription IN ACCESS EXCLUSIVE MODE"
PLAIN_GROUPS = """
SELECT name, secrets::text FROM producer_group WHERE jsonb_typeof(secrets) = 'array' AND secrets <> '[]'
"""
PLAIN_SUBSCRIPTIONS = """
SELECT subscription_id, name, secrets::text, credentials::text, destination::text FROM subscription
WHERE jsonb_typeof(secrets) = 'array' AND secrets <> '[]' OR credentials <> '{}' AND NOT credentials ? 'sealed'
  OR destination ? 'headers'
"""
SEAL_GROUP = "UPDATE producer_group SET secrets = cast(:secrets AS jsonb) WHERE name = :name"
SEAL_SUBSCRIPTION = """
UPDATE subscription SET secrets = cast(:secrets AS jsonb), credentials = cast(:credentials AS jsonb),
  destination = cast(:destination AS jsonb)
WHERE subscription_id = :subscription_id
"""
UP = (
    """
ALTER TABLE producer_group
    ADD CONSTRAINT producer_group_sealed CHECK (jsonb_typeof(secrets) = 'object' OR secrets = '[]')
""",
    """
ALTER TABLE subscription
    ADD CONSTRAINT subscription_sealed CHECK (
        (jsonb_typeof(secrets) = 'object' OR secrets = '[]') AND (credentials ? 'sealed' OR credentials = '{}')
        AND NOT destination ? 'headers'
    )
""",
    "DROP TABLE sealing",
)
# An older version reads sealed secrets. Because of the row in `sealing`, it also seals what it writes.
DOWN = (
    """
CREATE TABLE sealing (
        one BOOLEAN NOT NULL,
        since TIMESTAMP WITH TIME ZONE NOT NULL,
        headers BOOLEAN DEFAULT false NOT NULL,
        PRIMARY KEY (one),
        CONSTRAINT sealing_one CHECK (one)
    )
""",
    "INSERT INTO sealing (one, since, headers) VALUES (true, clock_timestamp(), true)",
    "ALTER TABLE subscription DROP CONSTRAINT subscription_sealed",
    "ALTER TABLE producer_group DROP CONSTRAINT producer_group_sealed",
)


def upgrade() -> None:
    op.execute(LOCK)
    _seal_plain_rows(context.config.attributes.get("key_file"))
    for statement in UP:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWN:
        op.execute(statement)


def _seal_plain_rows(key_file: Path | None) -> None:
    """Seal secrets in plain text with the newest key of the file. Raises UnusableDatabase if no key is usable."""
    database = op.get_bind()
    groups = database.execute(text(PLAIN_GROUPS)).all()
    subscriptions = database.execute(text(PLAIN_SUBSCRIPTIONS)).all()
    vault = Vault(key_file)
    try:
        for name, secrets in groups:
            sealed = vault.seal(GROUP_SECRETS, name, json.loads(secrets))
            database.execute(text(SEAL_GROUP), {"name": name, "secrets": json.dumps(sealed)})
        for subscription_id, name, *stored in subscriptions:
            sealed = _sealed(vault, name, *map(json.loads, stored))
            values = {column: json.dumps(value) for column, value in sealed.items()}
            database.execute(text(SEAL_SUBSCRIPTION), {"subscription_id": subscription_id, **values})
    except SecretsUnreadable as error:
        raise UnusableDatabase(
            f"{len(groups)} producer groups and {len(subscriptions)} subscriptions have secrets in plain text, and "
            f"this version stores them sealed. {error.detail} Set HALFNOTE_SECRETS_KEY_FILE to the key file that the "
            "service uses (`halfnote new-secrets-key` prints a key for a new one) and run `halfnote migrate` again."
        ) from None


def _sealed(vault: Vault, name: str, secrets: Any, credentials: Any, destination: Any) -> dict[str, Any]:
    """Return a subscription's columns, sealed. The extra headers of a webhook move from destination to credentials."""
    headers = destination.pop("headers", None)
    if headers:
        credentials, destination["header_names"] = {"headers": headers}, sorted(headers)
    return {
        "secrets": secrets if is_sealed(secrets) else vault.seal(SUBSCRIPTION_SECRETS, name, secrets),
        "credentials": credentials if is_sealed(credentials) else vault.seal(CREDENTIALS, name, credentials),
        "destination": destination,
    }
