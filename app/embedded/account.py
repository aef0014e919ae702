"""Who the server runs as. Postgres refuses to run as root, so a root service lends it an unprivileged account."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from app.embedded.errors import EmbeddedPostgresError


@dataclass(frozen=True)
class Account:
    """The user that initdb and postgres run as; `uid` None means the user of this process."""

    name: str
    uid: int | None = None
    gid: int | None = None

    @property
    def extra_groups(self) -> list[int] | None:
        """Supplementary groups for subprocess.Popen: none at all for another user, else those inherited."""
        return None if self.uid is None else []

    def own(self, path: Path) -> None:
        """Gives `path` (not what is below it) to the account."""
        if sys.platform != "win32" and self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def can_enter(self, directory: Path) -> bool:
        """Whether the account can traverse every ancestor of `directory` and the directory itself.

        Asked as that user, since mode bits alone do not tell (access control lists, mounts).
        """
        if self.uid is None:
            return True
        return self._succeeds(["/bin/sh", "-c", 'test -x "$0" && test -r "$0"', str(directory)])

    def can_run(self, executable: Path) -> bool:
        """Whether the account can execute `executable --version`."""
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
    """Whether this process has to lend the server another account."""
    return sys.platform != "win32" and os.geteuid() == 0


def account_for(cluster: Path) -> Account:
    """Chooses the account: ourselves unless root; for root the owner of an existing `cluster`, else `postgres`, else
    `nobody`.

    `postgres` exists for just this; `nobody` exists nearly everywhere but may be shared with other daemons.
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
