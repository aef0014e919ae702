"""The file of the keys that seal secrets: a key on each line, the newest last."""

import base64
import contextlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
# Seconds between two looks at whether the file has changed.
LOOK_EVERY_S = 1.0

_KEY = r"([0-9a-f]{8}) ([A-Za-z0-9+/]{43}=)"
_key_line = re.compile(_KEY).fullmatch
# What `>>` makes of a line whose end is missing.
_keys_in_one_line = re.compile(rf"{_KEY}\s*([0-9a-f]{{8}}) .*").fullmatch


class BadSecretsKeyFile(ValueError):
    """The key file is unusable; the text says why."""


@dataclass(frozen=True, slots=True)
class SealingKeys:
    """The keys of a file by id. `newest`, the id on the last line, is the key that seals."""

    by_id: Mapping[str, AESGCM]
    newest: str


def new_key() -> str:
    """Return a line for the key file: the id of a new key and its 256 bits in base64."""
    return f"{secrets.token_hex(4)} {base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}"


def read_keys(path: Path) -> SealingKeys:
    """Return the keys of a file. Raises BadSecretsKeyFile."""
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSecretsKeyFile(f"the key file {path} cannot be read: {error}") from error
    by_id: dict[str, AESGCM] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _key_line(line.strip())
        if found is None:
            if several := _keys_in_one_line(line.strip()):
                raise BadSecretsKeyFile(
                    f"line {number} of the key file {path} has more than one key: put a line end before {several[3]}, "
                    "so that each key has its own line"
                )
            raise BadSecretsKeyFile(f"line {number} of the key file {path} is not a key")
        if found[1] in by_id:
            raise BadSecretsKeyFile(f"line {number} of the key file {path} repeats the id {found[1]}")
        by_id[found[1]] = AESGCM(base64.b64decode(found[2]))
    if not by_id:
        raise BadSecretsKeyFile(f"the key file {path} has no key")
    return SealingKeys(by_id, list(by_id)[-1])


def make_key_file(path: Path) -> None:
    """Make a key file with one key that only its owner may read, unless the file exists. Raises OSError.

    The file appears whole, and is on the disk before a key of it seals anything.
    """
    if path.exists():
        return
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(new_key() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        # Unlike a rename, a link does not replace a file that another process has just made.
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()
    if os.name == "posix":
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class KeyFile:
    """A key file, and the keys that it had when the process last looked."""

    def __init__(self, path: Path, clock: Callable[[], float] = monotonic) -> None:
        self.path, self._clock = path, clock
        self._keys: SealingKeys | None = None
        self._version: tuple[int, ...] | None = None
        self._looked_at = 0.0

    def read(self) -> SealingKeys:
        """Read the file and return its keys. Raises BadSecretsKeyFile."""
        # The version first: what changes while the file is read is found by the next look.
        version = _version(self.path)
        self._keys = read_keys(self.path)
        self._version, self._looked_at = version, self._clock()
        return self._keys

    def present(self) -> SealingKeys:
        """Return the keys that the file has now, or had at most LOOK_EVERY_S ago.

        A file that is gone or unusable, as while it is replaced, changes nothing. Raises BadSecretsKeyFile if it was
        never usable.
        """
        if self._keys is None:
            return self.read()
        if self._clock() < self._looked_at + LOOK_EVERY_S:
            return self._keys
        self._looked_at = self._clock()
        if _version(self.path) != self._version:
            with contextlib.suppress(BadSecretsKeyFile):
                self.read()
        return self._keys


def _version(path: Path) -> tuple[int, ...] | None:
    """Return what differs after a file was changed or replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
