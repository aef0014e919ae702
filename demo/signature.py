"""Verifies requests from Halfnote by Standard Webhooks 1.0; the published `standardwebhooks` packages do the same."""

import base64
import hmac
import time
from collections.abc import Mapping
from hashlib import sha256

TOLERANCE_S = 300


def is_genuine(secret: str, headers: Mapping[str, str], body: bytes) -> bool:
    """Return whether the body was signed with the secret (`whsec_…`) within the last five minutes."""
    timestamp = headers.get("webhook-timestamp", "")
    if not timestamp.isdigit() or abs(time.time() - int(timestamp)) > TOLERANCE_S:
        return False
    signed = f"{headers.get('webhook-id', '')}.{timestamp}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    ours = "v1," + base64.b64encode(hmac.digest(key, signed, sha256)).decode()
    # During a secret rotation the header has several signatures.
    return any(hmac.compare_digest(ours, theirs) for theirs in headers.get("webhook-signature", "").split())
