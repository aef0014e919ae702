"""`halfnote rotate-keys` and `new-secrets-key`: keys that seal secrets in the database; `new-signing-secret`."""

import asyncio
from contextlib import ExitStack

import typer

from app.cli.errors import Refusal
from app.cli.leaving import leaving
from app.cli.serve import settings_with


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("rotate-keys")(rotate_keys)
    app.command("new-secrets-key")(new_secrets_key)
    app.command("new-signing-secret")(new_signing_secret)


def new_secrets_key() -> None:
    """Print a new key as a line for the key file. The key on the file's last line seals."""
    from app.secrets.key_file import new_key

    print(new_key())


def new_signing_secret() -> None:
    """Print a new secret (whsec_…) that signs checks or deliveries, for --secret and the service that verifies."""
    from app.secrets.signatures import new_secret

    print(new_secret())


def rotate_keys() -> None:
    """Seal every secret in the database again, by the last key of HALFNOTE_SECRETS_KEY_FILE.

    The service may run meanwhile. After an interruption, run the command again. Exit code 1 if a secret cannot be
    opened; it stays unchanged.
    """
    settings = settings_with()
    # Imported here: these modules take long to import, and other commands do not need them.
    from app.cli.os_user import person
    from app.cli.refusals import refusals
    from app.database.connection import refuse_unusable
    from app.embedded_postgres.attach import borrowed
    from app.errors import SecretsUnreadable
    from app.lifecycle.database import refuse_behind, refuse_without_keys, rotate_secret_keys
    from app.observability.logs import set_up_logs
    from app.operations.secret_rotation import Rotation

    async def rotated(url: str) -> Rotation:
        await refuse_unusable(url)
        await refuse_behind(url)
        return await rotate_secret_keys(url, settings.key_file, person())

    set_up_logs()
    with leaving(), refusals(), ExitStack() as stack:
        if settings.database_url:
            refuse_without_keys(settings.key_file)
        url = settings.database_url or stack.enter_context(borrowed(settings.data_dir))
        try:
            done = asyncio.run(rotated(url))
        except SecretsUnreadable as error:
            raise Refusal(error.detail) from None
    print(f"Sealed again by key {done.key}: {done.changed}. Could not be opened: {len(done.unreadable)}.")
    if done.unreadable:
        raise Refusal("\n".join(done.unreadable))
