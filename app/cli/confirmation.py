"""Ask a person before something is deleted."""

from typing import Annotated

import typer

from app.cli.errors import Refusal

Yes = Annotated[bool, typer.Option("--yes", help="do not ask for confirmation")]


def must_agree(question: str, nothing: str, *, yes: bool) -> None:
    """Ask unless `yes`. Raises Refusal with the text `nothing` if the person declines."""
    if not yes and not typer.confirm(question, err=True):
        raise Refusal(nothing)
