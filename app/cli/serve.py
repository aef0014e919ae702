"""`halfnote serve`, `migrate` and `version`: commands that do not call the API."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from app.cli.errors import WRONG_USAGE, Refusal
from app.config import Accept, ProcessRole, Settings

Host = Annotated[str | None, typer.Option(help="address to listen on; with auth off only a loopback address")]
Port = Annotated[int | None, typer.Option(help="port to listen on  [default: 8080]")]
DataDir = Annotated[Path | None, typer.Option(help="directory of the embedded Postgres  [default: .halfnote]")]
RoleOption = Annotated[
    ProcessRole | None, typer.Option(help="all, api (no loops), or worker (loops; also answers probes)")
]
Workers = Annotated[
    str | None, typer.Option(help="API processes, or `auto`: a worker process beside the API's  [default: auto]")
]
AcceptOption = Annotated[Accept | None, typer.Option(help="`ends` refuses new halves; everything else continues")]


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("serve")(serve_command)
    app.command("migrate")(migrate_command)
    app.command("version")(version_command)
    app.callback(help=app.info.help)(common_options)


def serve_command(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    role: RoleOption = None,
    workers: Workers = None,
    accept: AcceptOption = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C.

    The environment variable HALFNOTE_<NAME> sets an option as well; docs/configuration.md lists all of them.
    """
    settings = settings_with(host=host, port=port, data_dir=data_dir, role=role, workers=workers, accept=accept)
    # Imported here: the service takes long to import, and other commands do not need it.
    from app.cli.server_process import serve

    serve(settings)


def migrate_command(data_dir: DataDir = None) -> None:
    """Migrate the database (HALFNOTE_DATABASE_URL, else the embedded one) to this version's schema."""
    settings = settings_with(data_dir=data_dir)
    from app.cli.server_process import migrate_database

    print(migrate_database(settings))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version_command()
        raise typer.Exit


def common_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Declare the options that `halfnote` takes before a command."""


def version_command() -> None:
    """Print the version."""
    print(version("halfnote-server"))


def settings_with(**flags: Any) -> Settings:
    """Return the settings of the environment, overridden by the given flags. Child processes get both.

    Raises Refusal for a value that is not allowed.
    """
    for name, value in flags.items():
        if value is not None:
            os.environ[f"HALFNOTE_{name.upper()}"] = str(value)
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        # A fault of several settings names them in its text. Of a list only the setting is named, not the place in it.
        place = f"HALFNOTE_{first['loc'][0]}: ".upper() if first["loc"] else ""
        raise Refusal(f"{place}{first['msg'].removeprefix('Value error, ')}", code=WRONG_USAGE) from None
