"""A group of commands whose help lists them by name."""

import typer
from typer.core import TyperGroup


class SortedCommands(TyperGroup):
    """Lists its commands by name, and not in the order in which modules add them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the names of the commands, sorted."""
        return sorted(super().list_commands(ctx))
