"""Which options a person wrote, as opposed to those that have their defaults or come from the environment."""

import typer

from app.cli.errors import WRONG_USAGE, Refusal

WRITTEN = "COMMANDLINE"


def given(context: typer.Context, *names: str) -> list[str]:
    """Return the options among these parameters of a command that were written, as `--born-after`."""
    options = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    return [options[name] for name, source in sources.items() if source is not None and source.name == WRITTEN]


def refuse_before_command(context: typer.Context) -> None:
    """Raise Refusal if options were written before a command of a group: the command would not get them."""
    if ignored := given(context, *context.params):
        raise Refusal(
            f"Put {', '.join(ignored)} after the command: {context.command_path} {context.invoked_subcommand} "
            f"{ignored[0]} … Nothing was done.",
            code=WRONG_USAGE,
        )
