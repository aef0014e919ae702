"""Verifies Halfnote's requests by Standard Webhooks 1.0: `v1` (HMAC-SHA256) and `v1a` (ed25519).

The prefix of a secret shows its kind: both sides share a `whsec_…`; a `whpk_…` is the public key of a key pair of
Halfnote (needs `halfnote[ed25519]`).
"""

import base64
import binascii
import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from hashlib import sha256
from typing import TypeAlias

from halfnote.errors import HalfnoteError

SHARED, PUBLIC = "whsec_", "whpk_"
TOLERANCE_S = 300.0

# One secret, several (while one is being replaced), or a function that returns the current ones.
Secrets: TypeAlias = str | Sequence[str] | Callable[[], str | Sequence[str]]
_Fits: TypeAlias = Callable[[str, bytes], bool]


class SignatureError(HalfnoteError):
    """A request without a valid signature; the text says why."""


class Verifier:
    """Verifies requests by any of the secrets. `tolerance_s`: how far its time may be from this machine's."""

    def __init__(
        self, secrets: Secrets, *, tolerance_s: float = TOLERANCE_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._secrets, self._tolerance_s, self._clock = secrets, tolerance_s, clock
        self._known: dict[str, _Fits] = {}
        # Refuse an invalid secret now, not at the first request.
        self._fits()

    def verify(self, headers: Mapping[str, str], body: bytes) -> str:
        """Return the `webhook-id`; `headers` have names in lower case. Raises SignatureError.

        The signature is verified before the time, so that only a caller with a secret learns about clocks.
        """
        message_id, timestamp = headers.get("webhook-id"), headers.get("webhook-timestamp", "")
        given = headers.get("webhook-signature")
        if not message_id or not given or not (timestamp.isascii() and timestamp.isdigit()):
            raise SignatureError("webhook-id, webhook-timestamp or webhook-signature is missing: it was not signed")
        if "." in message_id:
            # Else a part of the body could pass as the time.
            raise SignatureError("webhook-id has a `.`, which no id of Halfnote has: altered request")
        signed = f"{message_id}.{timestamp}.".encode() + body
        fits = self._fits()
        if not any(fit(signature, signed) for signature in given.split(" ")[:20] for fit in fits):
            raise SignatureError(f"no signature fits any of {len(fits)} secrets: wrong secret, or altered request")
        self._check_time(int(timestamp[:12]))
        return message_id

    def _check_time(self, signed_at: int) -> None:
        now = self._clock()
        skew_s = signed_at - now
        if abs(skew_s) > self._tolerance_s:
            raise SignatureError(
                f"signed at {_shown(signed_at)} by the coordinator's clock, which is {abs(skew_s):.0f} s "
                f"{'ahead of' if skew_s > 0 else 'behind'} this machine's ({_shown(now)}); {self._tolerance_s:g} s are "
                f"allowed: {'' if skew_s > 0 else 'an old request sent again, or '}one of the two clocks is wrong"
            )

    def _fits(self) -> list[_Fits]:
        found = self._secrets() if callable(self._secrets) else self._secrets
        secrets = [found] if isinstance(found, str) else list(found) if isinstance(found, Iterable) else [found]
        for secret in secrets:
            if not isinstance(secret, str):
                raise TypeError(
                    "`secrets` must be text, several texts, or a function that returns them, not "
                    f"{type(secret).__name__}: is an environment variable missing?"
                )
        if not secrets:
            raise ValueError("a secret to verify with is missing")
        for secret in secrets:
            if secret not in self._known:
                self._known[secret] = _fit(secret)
        return [self._known[secret] for secret in secrets]


def sign(secret: str, message_id: str, body: bytes, at: float | None = None) -> dict[str, str]:
    """Return headers that `verify` accepts, signed with `whsec_…` at `at` (seconds since 1970)."""
    timestamp = str(int(time.time() if at is None else at))
    signature = _shared(_key(secret, SHARED), f"{message_id}.{timestamp}.".encode() + body)
    return {"webhook-id": message_id, "webhook-timestamp": timestamp, "webhook-signature": signature}


def _fit(secret: str) -> _Fits:
    """Return a function that verifies a signature, given with its version, against the secret."""
    if secret.startswith(PUBLIC):
        return _public_fit(_key(secret, PUBLIC))
    key = _key(secret, SHARED)
    return lambda signature, signed: hmac.compare_digest(signature.encode(), _shared(key, signed).encode())


def _public_fit(key: bytes) -> _Fits:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise ImportError("to verify with a public key (whpk_…): pip install 'halfnote[ed25519]'") from error
    public = Ed25519PublicKey.from_public_bytes(key)

    def fits(signature: str, signed: bytes) -> bool:
        version, _, encoded = signature.partition(",")
        try:
            if version == "v1a":
                public.verify(base64.b64decode(encoded, validate=True), signed)
                return True
        except (InvalidSignature, binascii.Error, ValueError):
            pass
        return False

    return fits


def _shared(key: bytes, signed: bytes) -> str:
    return "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()


def _key(secret: str, prefix: str) -> bytes:
    """Return a secret's bytes. Raises ValueError, without the secret."""
    try:
        key = base64.b64decode(secret.removeprefix(prefix), validate=True) if secret.startswith(prefix) else b""
    except (binascii.Error, ValueError):
        key = b""
    if not 24 <= len(key) <= 64:
        raise ValueError(f"a secret is `{SHARED}` or `{PUBLIC}` and the base64 of 24 to 64 bytes; this one is not")
    return key


def _shown(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return f"second {at:.0f}"
