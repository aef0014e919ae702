"""Seal and open secrets at rest: AES-256-GCM by the keys of a file.

A sealed column's JSON is `{"key": <id>, "sealed": <base64 of a nonce of 12 bytes and the ciphertext>}`. Column and row
are authenticated with the ciphertext, so a ciphertext that is copied to another row does not open there. An empty value
hides nothing and is stored as it is. Check constraints of the tables refuse any other value.
"""

import base64
import binascii
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeAlias

import msgspec
from cryptography.exceptions import InvalidTag

from app.errors import SecretsUnreadable
from app.secrets.key_file import BadSecretsKeyFile, KeyFile, SealingKeys, read_keys
from app.secrets.signatures import Secret, load

# What a sealed value is for. A session and a sign-in are in cookies of the console, the others are in columns.
Column: TypeAlias = Literal[
    "producer_group.secrets", "subscription.secrets", "subscription.credentials", "console.session", "console.sign_in"
]
GROUP_SECRETS: Column = "producer_group.secrets"
SUBSCRIPTION_SECRETS: Column = "subscription.secrets"
CREDENTIALS: Column = "subscription.credentials"
SESSION: Column = "console.session"
SIGN_IN: Column = "console.sign_in"

NONCE_BYTES = 12
# Opened secrets that a process caches, so that no check or delivery waits for a decryption.
CACHE_SIZE = 10_000


class Vault:
    """Seals and opens secrets by the keys of a file.

    The file is read at the first use, and again when a stored value names a key that was not in it. So a stored value
    also opens by a key that was removed since. A value that a caller sends opens only by the keys of the file of now.
    """

    def __init__(self, path: Path | None, clock: Callable[[], float] = monotonic) -> None:
        self._file = None if path is None else KeyFile(path, clock)
        # What the last reading for stored values found.
        self._keys: SealingKeys | None = None
        self._opened: dict[tuple[str, str], Any] = {}

    def seal(self, column: Column, name: str, value: Any) -> Any:
        """Return the JSON to store in the row `name`, sealed by the newest key; an empty value stays as it is.

        Raises SecretsUnreadable if there is no key.
        """
        if not value:
            return value
        keys = self._keys or self._read()
        if keys.newest not in (present := self._of_file(KeyFile.present)).by_id:
            # Nothing would open this value after a restart.
            keys = present
        nonce = os.urandom(NONCE_BYTES)
        ciphertext = keys.by_id[keys.newest].encrypt(nonce, msgspec.json.encode(value), _authenticated(column, name))
        return {"key": keys.newest, "sealed": base64.b64encode(nonce + ciphertext).decode()}

    def open(self, column: Column, name: str, stored: Any) -> Any:
        """Return the JSON that was sealed; an empty value is stored as it is.

        Raises SecretsUnreadable for a missing key, for a value that does not open, and for one in plain text.
        """
        if not stored:
            return stored
        if not is_sealed(stored):
            raise SecretsUnreadable(
                f"The {column} of `{name}` is stored in plain text, which is never used. Replace it by a PUT with a "
                "new secret or password.",
            )
        known = stored["sealed"], f"{column}:{name}"
        if known not in self._opened:
            if len(self._opened) >= CACHE_SIZE:
                self._opened.clear()
            self._opened[known] = self._decrypted(column, name, stored)
        return self._opened[known]

    def open_sent(self, column: Column, name: str, sent: Mapping[str, str]) -> Any:
        """Return the JSON of a sealed value that a caller sent, such as a cookie. Raises SecretsUnreadable.

        It opens by the keys that the file has now, within LOOK_EVERY_S. A key that no one knows does not make the
        process read the file, because anyone can send one, and does not change the key that seals.
        """
        return _opened_by(self._of_file(KeyFile.present), column, name, sent)

    def secrets(self, column: Column, name: str, stored: Any) -> list[Secret]:
        """Return signing secrets. Raises SecretsUnreadable."""
        return load(self.open(column, name, stored))

    def lacks(self, used: Iterable[str]) -> list[str]:
        """Return which of these keys the file lacks. Reads the file now, and does not change the key that seals."""
        try:
            known = read_keys(self._file.path).by_id if self._file is not None else {}
        except BadSecretsKeyFile:
            known = {}
        return [key for key in used if key not in known]

    def fresh(self) -> SealingKeys:
        """Read the file again and return its keys. Raises SecretsUnreadable."""
        return self._read()

    def _decrypted(self, column: Column, name: str, stored: Mapping[str, Any]) -> Any:
        key = stored["key"]
        keys = self._keys or self._read()
        if key not in keys.by_id:
            # Another process may seal by a key that was added since the last read.
            keys = self._read()
        return _opened_by(keys, column, name, stored)

    def _read(self) -> SealingKeys:
        self._keys = self._of_file(KeyFile.read)
        return self._keys

    def _of_file(self, keys: Callable[[KeyFile], SealingKeys]) -> SealingKeys:
        if self._file is None:
            raise SecretsUnreadable("HALFNOTE_SECRETS_KEY_FILE is not set, so secrets cannot be sealed or opened.")
        try:
            return keys(self._file)
        except BadSecretsKeyFile as error:
            raise SecretsUnreadable(f"Secrets cannot be sealed or opened: {error}.") from error


def is_sealed(stored: Any) -> bool:
    """Return whether a column's JSON is sealed."""
    return isinstance(stored, Mapping) and "sealed" in stored and "key" in stored


def _opened_by(keys: SealingKeys, column: Column, name: str, sealed: Mapping[str, Any]) -> Any:
    """Return the JSON that one of these keys sealed. Raises SecretsUnreadable."""
    key = sealed["key"]
    if key not in keys.by_id:
        raise SecretsUnreadable(
            f"The {column} of `{name}` is sealed by key {key}, which the key file lacks. Restore the key's line "
            "from a backup. If the key is lost, replace the value by a PUT with a new secret or password.",
            key=key,
        )
    try:
        ciphertext = base64.b64decode(sealed["sealed"], validate=True)
        nonce, rest = ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:]
        return msgspec.json.decode(keys.by_id[key].decrypt(nonce, rest, _authenticated(column, name)))
    except (InvalidTag, binascii.Error, ValueError) as error:
        raise SecretsUnreadable(
            f"The {column} of `{name}` does not open by key {key}: the key file has another key with this id, or "
            "the value was changed or copied from another row. Restore the right key's line, or replace the value "
            "by a PUT with a new secret or password.",
            key=key,
        ) from error


def _authenticated(column: Column, name: str) -> bytes:
    return f"{column}:{name}".encode()
