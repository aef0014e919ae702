"""Ask a person before something is deleted."""

from typing import Annotated

import typer

from app.cli.errors import WRONG_USAGE, Refusal

Yes = Annotated[bool, typer.Option("--yes", help="do not ask for confirmation")]


def must_agree(question: str, nothing: str, *, yes: bool) -> None:
    """Ask unless `yes`. Raises Refusal with the text `nothing` if the person declines, or if there is no answer."""
    if yes:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort as no_answer:
        if isinstance(no_answer.__context__, KeyboardInterrupt):
            raise
        raise Refusal(f"{nothing} There was no answer: add --yes to go on without one.", code=WRONG_USAGE) from None
    if not agreed:
        raise Refusal(nothing)
