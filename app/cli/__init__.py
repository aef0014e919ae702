"""`halfnote`: serve, migrate, reconcile, and on the command line what the API does."""

import sys

import typer

from app.cli import (
    archive,
    audit,
    dead_letters,
    deciding,
    findings,
    groups,
    keys,
    operation,
    proof,
    secrets,
    serve,
    subscriptions,
    topics,
    transactions,
)
from app.cli.refusal import Refusal

app = typer.Typer(
    name="halfnote",
    help="A transaction coordinator over HTTP. Calls go to --url (or HALFNOTE_URL), with the key in HALFNOTE_API_KEY.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
serve.install(app)
operation.install(app)
proof.install(app)
archive.install(app)
secrets.install(app)
deciding.install(transactions.app)
app.add_typer(groups.app, name="groups")
app.add_typer(subscriptions.app, name="subscriptions")
app.add_typer(transactions.app, name="transactions")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(findings.app, name="findings")
app.add_typer(topics.app, name="topics")
app.add_typer(keys.app, name="keys")
app.command("audit")(audit.audit)


def main() -> None:
    """Run the command line; a refusal is one line on stderr and exit code 1, wrong usage is 2."""
    try:
        app(prog_name="halfnote")
    except Refusal as refusal:
        print(f"halfnote: {refusal}", file=sys.stderr)
        sys.exit(refusal.code)
