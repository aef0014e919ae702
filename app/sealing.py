"""Secrets at rest: AES-256-GCM by the keys of a file. What is stored says which key opens it, and belongs where it is.

Sealed, a column's JSON is `{"key": <id>, "sealed": <base64 of a nonce of 12 bytes and the ciphertext>}`. The place
(column and row) is authenticated with it, so a ciphertext that somebody copied to another row does not open there. What
is stored otherwise is in plain text, from before secrets were sealed.
"""

import base64
import binascii
import contextlib
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from app.errors import SecretsUnreadable
from app.signing import Secret, load

Column: TypeAlias = Literal["producer_group.secrets", "subscription.secrets", "subscription.credentials"]
GROUP_SECRETS: Column = "producer_group.secrets"
SUBSCRIPTION_SECRETS: Column = "subscription.secrets"
CREDENTIALS: Column = "subscription.credentials"

KEY_BYTES, NONCE_BYTES = 32, 12
# The revisions from which on a version reads what is sealed: secrets and credentials, and webhooks' own headers.
SECRETS_READ_FROM, HEADERS_READ_FROM = 8, 10
# Opened secrets that are remembered, so that nothing is decrypted for each check.
REMEMBERED = 10_000

_line = re.compile(r"([0-9a-f]{8}) ([A-Za-z0-9+/]{43}=)").fullmatch


class BadKeyFile(ValueError):
    """The key file can't be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file by id; `newest`, the last line's, is the one that seals."""

    by_id: Mapping[str, AESGCM]
    newest: str


def new_key() -> str:
    """Return a line for the key file: a new key's id, and its 256 bits in base64."""
    return f"{secrets.token_hex(4)} {base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}"


def read_keys(path: Path) -> Keys:
    """Return a file's keys. Raises BadKeyFile."""
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise BadKeyFile(f"the key file {path} can't be read: {error}") from error
    by_id: dict[str, AESGCM] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _line(line.strip())
        if found is None or found[1] in by_id:
            raise BadKeyFile(f"line {number} of the key file {path} is no key, or its id is there twice")
        by_id[found[1]] = AESGCM(base64.b64decode(found[2]))
    if not by_id:
        raise BadKeyFile(f"the key file {path} holds no key")
    return Keys(by_id, list(by_id)[-1])


def make_key_file(path: Path) -> None:
    """Make a key file with one key, readable by its owner alone, unless there is one. Raises OSError.

    It appears whole, and is on the disk before anything is sealed by it.
    """
    if path.exists():
        return
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(new_key() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        # Unlike a rename, a link does not take the place of a file that another process made just now.
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


class Vault:
    """Seals and opens by the keys of a file, which is read when a key is wanted, and again for one it did not have."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._keys: Keys | None = None
        self._opened: dict[tuple[str, str], Any] = {}

    def seal(self, column: Column, name: str, value: Any) -> Any:
        """Return JSON as it is to be stored in a row, by the newest key; what is empty hides nothing.

        Raises SecretsUnreadable if there is no key.
        """
        if not value:
            return value
        keys = self._keys or self._read()
        nonce = os.urandom(NONCE_BYTES)
        ciphertext = keys.by_id[keys.newest].encrypt(nonce, msgspec.json.encode(value), _place(column, name))
        return {"key": keys.newest, "sealed": base64.b64encode(nonce + ciphertext).decode()}

    def open(self, column: Column, name: str, stored: Any) -> Any:
        """Return the JSON that was sealed, or what is stored in plain text. Raises SecretsUnreadable."""
        if not is_sealed(stored):
            return stored
        known = stored["sealed"], f"{column}:{name}"
        if known not in self._opened:
            if len(self._opened) >= REMEMBERED:
                self._opened.clear()
            self._opened[known] = self._decrypted(column, name, stored)
        return self._opened[known]

    def secrets(self, column: Column, name: str, stored: Any) -> list[Secret]:
        """Return signing secrets. Raises SecretsUnreadable."""
        return load(self.open(column, name, stored))

    def lacks(self, used: Iterable[str]) -> list[str]:
        """Return which of these keys the file lacks; what it has now is looked at, and not sealed by from here on."""
        try:
            known = read_keys(self._path).by_id if self._path is not None else {}
        except BadKeyFile:
            known = {}
        return [key for key in used if key not in known]

    def fresh(self) -> Keys:
        """Return the keys as the file has them now. Raises SecretsUnreadable."""
        return self._read()

    def _decrypted(self, column: Column, name: str, stored: Mapping[str, Any]) -> Any:
        key = stored["key"]
        keys = self._keys or self._read()
        if key not in keys.by_id:
            # Perhaps another process seals by a key that was added since.
            keys = self._read()
        if key not in keys.by_id:
            raise SecretsUnreadable(
                f"The {column} of `{name}` is sealed by key {key}, which the key file lacks. Put its line back from a "
                "backup; if it is lost, a PUT with a new secret or password replaces what it sealed.",
                key=key,
            )
        try:
            sealed = base64.b64decode(stored["sealed"], validate=True)
            return msgspec.json.decode(
                keys.by_id[key].decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], _place(column, name))
            )
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise SecretsUnreadable(
                f"The {column} of `{name}` does not open by key {key}: the file has another key of this id, or the "
                "row was changed or copied from another.",
                key=key,
            ) from error

    def _read(self) -> Keys:
        if self._path is None:
            raise SecretsUnreadable("HALFNOTE_SECRETS_KEY_FILE is not set, so secrets can't be sealed or opened.")
        try:
            self._keys = read_keys(self._path)
        except BadKeyFile as error:
            raise SecretsUnreadable(f"Secrets can't be sealed or opened: {error}.") from error
        return self._keys


def is_sealed(stored: Any) -> bool:
    """Tell whether a column's JSON is sealed."""
    return isinstance(stored, Mapping) and "sealed" in stored and "key" in stored


def _place(column: Column, name: str) -> bytes:
    return f"{column}:{name}".encode()
