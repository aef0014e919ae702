"""`halfnote rotate-keys` and `new-secrets-key`: the keys that secrets are sealed by in the database."""

import asyncio
from contextlib import ExitStack

import typer

from app.cli.refusal import Refusal
from app.cli.serve import settings_with


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("rotate-keys")(rotate_keys)
    app.command("new-secrets-key")(new_secrets_key)


def new_secrets_key() -> None:
    """Print a new key, a line for the key file. The last line of the file is the key that seals."""
    from app.sealing import new_key

    print(new_key())


def rotate_keys() -> None:
    """Seal every secret in the database anew, by the last key of HALFNOTE_SECRETS_KEY_FILE.

    The service may go on meanwhile, and what was interrupted is taken up by running it again. Ends with 1 if a secret
    could not be opened; it stays as it is.
    """
    settings = settings_with()
    # Only here: what they need takes long to import, and other commands don't need it.
    from app.cli.person import person
    from app.cli.service import refusals
    from app.embedded.running import borrowed
    from app.errors import SecretsUnreadable
    from app.start import refuse_behind, refuse_without_keys, seal_all
    from app.telemetry import set_up_logs

    set_up_logs()
    with refusals(), ExitStack() as stack:
        if settings.database_url:
            refuse_without_keys(settings.key_file)
        url = settings.database_url or stack.enter_context(borrowed(settings.data_dir))
        asyncio.run(refuse_behind(url))
        try:
            done = asyncio.run(seal_all(url, settings.key_file, person()))
        except SecretsUnreadable as error:
            raise Refusal(error.detail) from None
    print(f"Sealed anew by key {done.key}: {done.changed}. Could not be opened: {len(done.unreadable)}.")
    if done.unreadable:
        raise Refusal("\n".join(done.unreadable))
