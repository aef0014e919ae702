"""`halfnote serve`, `migrate` and `version`: what runs here rather than over HTTP."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from app.cli.refusal import Refusal
from app.config import Accept, Role, Settings

WRONG_USAGE = 2

Host = Annotated[str | None, typer.Option(help="address to listen on; with auth off only a loopback one")]
Port = Annotated[int | None, typer.Option(help="port to listen on  [default: 8080]")]
DataDir = Annotated[Path | None, typer.Option(help="where the embedded Postgres keeps its files  [default: .halfnote]")]
RoleOption = Annotated[Role | None, typer.Option(help="all, api (no loops) or worker (loops; still answers health)")]
Workers = Annotated[int | None, typer.Option(help="API processes  [default: 1]")]
AcceptOption = Annotated[Accept | None, typer.Option(help="`ends` refuses new halves while all else goes on")]


def install(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("serve")(serve_command)
    app.command("migrate")(migrate_command)
    app.command("version")(version_command)


def serve_command(
    host: Host = None,
    port: Port = None,
    data_dir: DataDir = None,
    role: RoleOption = None,
    workers: Workers = None,
    accept: AcceptOption = None,
) -> None:
    """Run the service until SIGTERM or Ctrl-C.

    Every option can also be set as HALFNOTE_<NAME>; docs/configuration.md lists them all.
    """
    settings = settings_with(host=host, port=port, data_dir=data_dir, role=role, workers=workers, accept=accept)
    # Only here: what the service needs takes long to import, and other commands don't need it.
    from app.cli.service import serve

    serve(settings)


def migrate_command(data_dir: DataDir = None) -> None:
    """Bring the database (HALFNOTE_DATABASE_URL, else the embedded one) to this version's schema."""
    settings = settings_with(data_dir=data_dir)
    from app.cli.service import migrate_database

    migrate_database(settings)
    print("The database is at this version's schema.")


def version_command() -> None:
    """Print the version."""
    print(version("halfnote-server"))


def settings_with(**flags: Any) -> Settings:
    """Return the settings of the environment with the flags that were given over them; both reach child processes.

    Raises Refusal for a value that is not allowed.
    """
    for name, value in flags.items():
        if value is not None:
            os.environ[f"HALFNOTE_{name.upper()}"] = str(value)
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        raise Refusal(f"HALFNOTE_{name}: {first['msg'].removeprefix('Value error, ')}", code=WRONG_USAGE) from None
