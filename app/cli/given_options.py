"""Which options a person wrote, as opposed to those that have their defaults or come from the environment."""

import typer

WRITTEN = "COMMANDLINE"


def given(context: typer.Context, *names: str) -> list[str]:
    """Return the options among these parameters of a command that were written, as `--born-after`."""
    sources = {name: context.get_parameter_source(name) for name in names}
    written = [name for name, source in sources.items() if source is not None and source.name == WRITTEN]
    return [f"--{name.replace('_', '-')}" for name in written]
