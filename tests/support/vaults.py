"""Secrets in the tests' databases, opened by the tests' keys."""

import os
from pathlib import Path
from typing import Any

import msgspec

from app.database.connection import Connection
from app.secrets.vault import CREDENTIALS, GROUP_SECRETS, SUBSCRIPTION_SECRETS, Vault


def vault() -> Vault:
    """Return the vault with the keys of services that tests start."""
    return Vault(Path(os.environ["HALFNOTE_SECRETS_KEY_FILE"]))


async def group_secrets(db: Connection, name: str = "shop") -> list[str]:
    """Return a group's secrets, the newest first."""
    stored = msgspec.json.decode(await db.fetchval("select secrets from producer_group where name = $1", name))
    return [known.secret for known in vault().secrets(GROUP_SECRETS, name, stored)]


async def subscription_secrets(db: Connection, name: str = "mailer") -> list[str]:
    """Return a subscription's signing secrets, the newest first."""
    stored = msgspec.json.decode(await db.fetchval("select secrets from subscription where name = $1", name))
    return [known.secret for known in vault().secrets(SUBSCRIPTION_SECRETS, name, stored)]


async def credentials(db: Connection, name: str = "mailer") -> Any:
    """Return the credentials that a subscription's broker gets."""
    stored = msgspec.json.decode(await db.fetchval("select credentials from subscription where name = $1", name))
    return vault().open(CREDENTIALS, name, stored)
