"""Sign requests by Standard Webhooks 1.0: `v1` (HMAC-SHA256) and `v1a` (ed25519).

The prefix of a secret names its kind: `whsec_` and the base64 of a shared key, or `whsk_` and the base64 of an ed25519
private key, whose public key, `whpk_…`, is all that a receiver needs. The specification does not name the form of a
private key: new keys have 64 bytes (seed, then public key), and the seed of 32 bytes alone is accepted as well.
"""

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Kind = Literal["v1", "v1a"]

PREFIX, PRIVATE_PREFIX, PUBLIC_PREFIX = "whsec_", "whsk_", "whpk_"
# The specification asks for 24 to 64 bytes.
FEWEST_BYTES, MOST_BYTES, NEW_BYTES = 24, 64, 32
SEED_BYTES = 32
# SHA-256 takes its input in blocks of this size.
BLOCK_BYTES = 64
# What HMAC makes of each byte of a key.
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
# How long the old secret signs as well after a rotation.
OVERLAP = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class Secret:
    """A signing secret: its text, and when it stops signing (None: the current one)."""

    secret: str
    expires_at: datetime | None = None


class Signer:
    """Signs with the secrets of one receiver."""

    def __init__(self, secrets_: Sequence[Secret]) -> None:
        self._signs = [(known.expires_at, _sign(known.secret)) for known in secrets_]

    def headers(self, message_id: str, body: bytes, now: datetime) -> dict[str, str]:
        """Return `webhook-id`, `webhook-timestamp` and `webhook-signature` (one signature for each valid secret)."""
        timestamp = str(int(now.timestamp()))
        signed = f"{message_id}.{timestamp}.".encode() + body
        signatures = [sign(signed) for expires_at, sign in self._signs if expires_at is None or expires_at > now]
        return {"webhook-id": message_id, "webhook-timestamp": timestamp, "webhook-signature": " ".join(signatures)}


def headers(secrets_: Sequence[Secret], message_id: str, body: bytes, now: datetime) -> dict[str, str]:
    """Return the headers of one message; a `Signer` does the same for many."""
    return Signer(secrets_).headers(message_id, body, now)


def new_secret(kind: Kind = "v1") -> str:
    """Return a new secret of 256 bits, or a new private key."""
    fresh = secrets.token_bytes(NEW_BYTES)
    if kind == "v1":
        return PREFIX + base64.b64encode(fresh).decode()
    return PRIVATE_PREFIX + base64.b64encode(fresh + _public(fresh)).decode()


def kind_of(secret: str) -> Kind:
    """Return the kind of a secret's signatures."""
    return "v1a" if secret.startswith(PRIVATE_PREFIX) else "v1"


def public_key(secret: str) -> str | None:
    """Return the public key of a private key, `whpk_…`; None for a shared secret."""
    if kind_of(secret) == "v1":
        return None
    return PUBLIC_PREFIX + base64.b64encode(_public(_key(secret)[:SEED_BYTES])).decode()


def secret_fault(secret: str, kinds: tuple[Kind, ...] = ("v1",)) -> str | None:
    """Return what is wrong with a user's secret, or None; `kinds` are the allowed kinds."""
    kind = kind_of(secret)
    try:
        key = _key(secret) if secret.startswith((PREFIX, PRIVATE_PREFIX)) else b""
    except (binascii.Error, ValueError):
        key = b""
    if kind == "v1" and FEWEST_BYTES <= len(key) <= MOST_BYTES and kind in kinds:
        return None
    if kind == "v1a" and kind in kinds and len(key) >= SEED_BYTES:
        seed, public = key[:SEED_BYTES], key[SEED_BYTES:]
        if public in (b"", _public(seed)):
            return None
    forms = {
        "v1": f"`{PREFIX}` and the base64 of {FEWEST_BYTES} to {MOST_BYTES} bytes",
        "v1a": f"`{PRIVATE_PREFIX}` and the base64 of an ed25519 private key: its seed, with or without the public key",
    }
    return "must be " + ", or ".join(forms[known] for known in sorted(kinds))


def rotated(stored: Sequence[Secret], secret: str, now: datetime) -> list[Secret]:
    """Return the secrets after a rotation: the new one first, the former ones until their overlap ends."""
    until = now + OVERLAP
    former = [Secret(old.secret, min(old.expires_at or until, until)) for old in stored if old.secret != secret]
    return [Secret(secret), *(old for old in former if old.expires_at is not None and old.expires_at > now)]


def overlap_end(stored: Sequence[Secret], now: datetime) -> datetime | None:
    """Return until when former secrets sign beside the current one; None: the current one alone signs."""
    ends = [known.expires_at for known in stored if known.expires_at is not None]
    return max((end for end in ends if end > now), default=None)


def signs(stored: Sequence[Secret], secret: str, now: datetime) -> bool:
    """Return whether a secret is one of those that sign now.

    In constant time, because the caller may not know them: `==` ends at the first character that differs.
    """
    given = secret.encode()
    equal = [secrets.compare_digest(known.secret.encode(), given) for known in stored if _is_valid(known, now)]
    return any(equal)


def dump(secrets_: Sequence[Secret]) -> list[dict[str, Any]]:
    """Return secrets as the JSON that tables store."""
    return [
        {"secret": known.secret, "expires_at": known.expires_at.isoformat() if known.expires_at else None}
        for known in secrets_
    ]


def load(stored: Sequence[Mapping[str, Any]]) -> list[Secret]:
    """Return secrets from the JSON that tables store."""
    return [
        Secret(row["secret"], datetime.fromisoformat(row["expires_at"]) if row["expires_at"] else None)
        for row in stored
    ]


def _is_valid(known: Secret, now: datetime) -> bool:
    return known.expires_at is None or known.expires_at > now


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix(PREFIX).removeprefix(PRIVATE_PREFIX), validate=True)


def _public(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _sign(secret: str) -> Callable[[bytes], str]:
    """Return a function that signs bytes with a secret; the signature begins with its identifier."""
    key = _key(secret)
    if kind_of(secret) == "v1":
        digest = _hmac(key)
        return lambda signed: "v1," + base64.b64encode(digest(signed)).decode()
    private = Ed25519PrivateKey.from_private_bytes(key[:SEED_BYTES])
    return lambda signed: "v1a," + base64.b64encode(private.sign(signed)).decode()


def _hmac(key: bytes) -> Callable[[bytes], bytes]:
    """Return HMAC-SHA256 (RFC 2104) with this key.

    The states of both hashes after the key are kept, because for a short message the key is half the work.
    """
    padded = (key if len(key) <= BLOCK_BYTES else sha256(key).digest()).ljust(BLOCK_BYTES, b"\0")
    inner, outer = sha256(padded.translate(_INNER)), sha256(padded.translate(_OUTER))

    def digest(signed: bytes) -> bytes:
        of_message, whole = inner.copy(), outer.copy()
        of_message.update(signed)
        whole.update(of_message.digest())
        return whole.digest()

    return digest
