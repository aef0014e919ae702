"""`halfnote drain`: refuse new halves on a running service, or accept them again."""

from typing import Annotated

import typer

from app.cli.api_client import DEFAULT_URL, AsJson, Url, call, print_json


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("drain")(drain)


def drain(
    off: Annotated[bool, typer.Option("--off", help="accept new halves again")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Refuse new halves on every replica. Ends, checks and deliveries continue."""
    answer = call(url, "PUT", "/accept", content={"accept": "all" if off else "ends"}, as_json=as_json)
    if as_json:
        print_json(answer)
    elif answer["accept"] == "ends":
        print("New halves are refused; ends, checks and deliveries go on.")
        print("To take them again: halfnote drain --off")
    elif answer["here"] == "ends":
        print("The switch is off, but this replica still refuses new halves:")
        print("HALFNOTE_ACCEPT=ends is set there, or it is stopping.")
    else:
        print("New halves are taken.")
