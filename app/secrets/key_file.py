"""The file of the keys that seal secrets: a key on each line, the newest last."""

import base64
import contextlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32

_key_line = re.compile(r"([0-9a-f]{8}) ([A-Za-z0-9+/]{43}=)").fullmatch


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
