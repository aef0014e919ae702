"""The server's user. Postgres refuses to run as root, so a root service runs it under an unprivileged account."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from app.embedded_postgres.errors import EmbeddedPostgresError


@dataclass(frozen=True)
class Account:
    """The user that initdb and postgres run as; `uid` None means the user of this process."""

    name: str
    uid: int | None = None
    gid: int | None = None

    @property
    def extra_groups(self) -> list[int] | None:
        """Supplementary groups for subprocess.Popen: none for another user, else the inherited ones."""
        return None if self.uid is None else []

    def own(self, path: Path) -> None:
        """Make the account the owner of `path`, not of the files below it."""
        if sys.platform != "win32" and self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def can_enter(self, directory: Path) -> bool:
        """Return whether the account can traverse `directory` and all of its ancestors.

        Tested as that user, since mode bits do not show access control lists and mounts.
        """
        if self.uid is None:
            return True
        return self._succeeds(["/bin/sh", "-c", 'test -x "$0" && test -r "$0"', str(directory)])

    def can_run(self, executable: Path) -> bool:
        """Return whether the account can execute `executable --version`."""
        return self._succeeds([str(executable), "--version"])

    def _succeeds(self, command: list[str]) -> bool:
        try:
            outcome = subprocess.run(  # noqa: S603 - fixed commands
                command,
                user=self.uid,
                group=self.gid,
                extra_groups=self.extra_groups,
                cwd="/" if self.uid is not None else None,
                capture_output=True,
            )
        except PermissionError:
            return False
        return outcome.returncode == 0


def runs_as_root() -> bool:
    """Return whether this process runs as root and the server needs another account."""
    return sys.platform != "win32" and os.geteuid() == 0


def account_for(cluster: Path) -> Account:
    """Return the server's account: this user; for root the owner of `cluster`, else `postgres`, else `nobody`.

    The user `postgres` is made for this; `nobody` exists on most systems but other daemons may share it.
    """
    if sys.platform == "win32" or not runs_as_root():
        return Account("this user")
    import pwd

    if cluster.exists() and (owner := cluster.stat()).st_uid != 0:
        return Account(f"uid {owner.st_uid}", owner.st_uid, owner.st_gid)
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedPostgresError(
        "Postgres does not run as root, and this system has neither a user `postgres` nor `nobody` to run it as. "
        "Create one (`useradd --system postgres`), start Halfnote as another user, or set HALFNOTE_DATABASE_URL."
    )
