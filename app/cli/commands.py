"""Every command of `halfnote`, and how a command ends."""

import sys
from typing import NoReturn

import typer

from app.cli import (
    apply,
    archive,
    audit,
    certificate,
    consume,
    dead_letters,
    drain,
    findings,
    groups,
    keys,
    messages,
    proof,
    reconcile,
    rocketmq,
    search,
    secrets,
    serve,
    status,
    subscriptions,
    topics,
    transaction_actions,
    transactions,
    watch,
    why,
    workers,
)
from app.cli.errors import Refusal
from app.cli.sorted_commands import SortedCommands
from app.cli.standard_output import discard_output, is_of_output, output_error, prepare_streams

app = typer.Typer(
    name="halfnote",
    help="A transaction coordinator over HTTP. Commands call --url (or HALFNOTE_URL) with the key in HALFNOTE_API_KEY.",
    no_args_is_help=True,
    cls=SortedCommands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
serve.install(app)
drain.install(app)
apply.install(app)
reconcile.install(app)
archive.install(app)
secrets.install(app)
transaction_actions.install(transactions.app)
app.add_typer(groups.app, name="groups")
app.add_typer(subscriptions.app, name="subscriptions")
app.add_typer(transactions.app, name="transactions")
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(findings.app, name="findings")
app.add_typer(certificate.app, name="certificate")
app.add_typer(topics.app, name="topics")
app.add_typer(messages.app, name="messages")
app.add_typer(proof.app, name="proof")
app.add_typer(keys.app, name="keys")
app.command("search")(search.search)
app.command("status")(status.status)
app.command("watch")(watch.watch)
app.add_typer(audit.app, name="audit")
app.command("consume")(consume.consume)
app.command("rocketmq")(rocketmq.rocketmq)
app.command("why")(why.why)
app.command("workers")(workers.workers)


def run() -> NoReturn:
    """Run the command that the arguments name, and end the process with its exit code.

    A refusal is printed on stderr and ends with exit code 1, wrong usage with 2. So does an answer that stdout does not
    take, with 1, and in silence if its reader is gone.
    """
    prepare_streams()
    code: str | int | None = 0
    fault = None
    try:
        app(prog_name="halfnote")
    except Refusal as refusal:
        print(f"halfnote: {refusal}", file=sys.stderr)
        code = refusal.code
    except SystemExit as ended:
        # typer ends so after a broken pipe, also if it was not that of stdout.
        if isinstance(cause := ended.__context__, BrokenPipeError) and not is_of_output(cause):
            _finish_output()
            raise cause from None
        code = ended.code
    except OSError as error:
        if not is_of_output(error):
            _finish_output()
            raise
        fault = error
    fault = fault or output_error()
    if fault is not None:
        discard_output()
        code = code or 1
        if not isinstance(fault, BrokenPipeError):
            said = f"The answer cannot be printed: {fault.strerror}. What was asked may have been done."
            print(f"halfnote: {said}", file=sys.stderr)
    sys.exit(code)


def _finish_output() -> None:
    """Print what is left. If stdout does not take it, an error of another cause is more important."""
    if output_error() is not None:
        discard_output()
