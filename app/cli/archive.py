"""`halfnote archive`, `restore` and `redact`: run the programs of the Parquet archive in Spark processes."""

import typer

from app.cli import reconcile


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (archive, restore, redact):
        app.command(context_settings=reconcile.PASSED_ON)(command)


def archive(context: typer.Context) -> None:
    """Archive settled days as Parquet at HALFNOTE_ARCHIVE, so that they can be removed; --verify checks it.

    Exit codes: 0 done, 1 it failed, 2 wrong usage, 3 an archive differs from what was written.
    `halfnote archive --help` lists the options.
    """
    reconcile.run("archive", context.args)


def restore(context: typer.Context) -> None:
    """Restore an archived DAY into a schema of its own, for reading; --drop removes the schema."""
    reconcile.run("restore", context.args)


def redact(context: typer.Context) -> None:
    """Remove one message's body from the archive for good: MESSAGE_ID --reason …"""
    reconcile.run("redact", context.args)
