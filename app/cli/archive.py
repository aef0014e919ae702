"""`halfnote archive`, `restore` and `redact`: days that left for Parquet. Spark runs them in processes of their own."""

import typer

from app.cli import proof


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (archive, restore, redact):
        app.command(context_settings=proof.PASSED_ON)(command)


def archive(context: typer.Context) -> None:
    """Take settled days to Parquet at HALFNOTE_ARCHIVE, so that they may leave the database; or --verify what is there.

    Ends with 0: done; 1: it failed; 2: wrong usage; 3: an archive is not what was written.
    `halfnote archive --help` has the options.
    """
    proof.run("spark.jobs.archive", context.args)


def restore(context: typer.Context) -> None:
    """Bring an archived DAY back into the database to be looked at, in a schema of its own; --drop removes it."""
    proof.run("spark.jobs.restore", context.args)


def redact(context: typer.Context) -> None:
    """Take one message's body out of the archive, for good: MESSAGE_ID --reason …"""
    proof.run("spark.jobs.redact", context.args)
