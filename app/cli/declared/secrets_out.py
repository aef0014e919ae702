"""Where the secrets go that the service makes and shows once: a file that only its owner reads, or stdout."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from app.cli.declared.changes import Change
from app.cli.errors import WRONG_USAGE, Refusal

STDOUT = Path("-")


class SecretsOut:
    """Collects new secrets by section and name. With a file, each is on disk before the next request is sent."""

    def __init__(self, target: Path | None) -> None:
        self._file = None if target in (None, STDOUT) else target
        self.is_chosen = target is not None
        self.found: dict[str, dict[str, str]] = {}
        if self._file is not None:
            self.found = _former(self._file)

    def must_take(self, changes: list[Change]) -> None:
        """Check that the secrets which these changes make will not be lost. Raises Refusal."""
        makers = [f"{one.section}.{one.name}" for one in changes if one.makes_secret]
        if not makers:
            return
        if not self.is_chosen and not sys.stdout.isatty():
            raise Refusal(
                f"Nothing was changed. The service will make secrets and show them once: {', '.join(makers)}.\n"
                "  Add --secrets-out FILE (`-` for stdout), or declare secrets as `{env: NAME}` or `{file: PATH}`.",
                code=WRONG_USAGE,
            )
        if self._file is not None:
            self._write()

    def add(self, section: str, name: str, secret: str) -> None:
        """Keep a secret. Raises Refusal if the file cannot be written."""
        self.found.setdefault(section, {})[name] = secret
        if self._file is not None:
            self._write()

    @property
    def to_print(self) -> dict[str, dict[str, str]]:
        """The secrets that go to stdout."""
        return {} if self._file is not None else self.found

    def _write(self) -> None:
        assert self._file is not None
        beside = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        try:
            # Replaced as a whole: an interruption leaves the former file.
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(self.found, file, indent=2, ensure_ascii=False)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self._file)
        except OSError as error:
            raise Refusal(
                f"--secrets-out: {self._file} cannot be written: {error.strerror}.", code=WRONG_USAGE
            ) from None


def _former(file: Path) -> dict[str, dict[str, str]]:
    """Return the secrets that a former run wrote. Raises Refusal for a file of something else."""
    if not file.exists():
        return {}
    try:
        read: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        read = None
    if not isinstance(read, dict) or not all(isinstance(one, dict) for one in read.values()):
        raise Refusal(
            f"--secrets-out: {file} exists, and `halfnote apply` did not write it. Name another file.", code=WRONG_USAGE
        )
    return read
