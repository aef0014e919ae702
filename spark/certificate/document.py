"""The certificate as a document: one JSON object of canonical bytes, `{"certificate": {…}, "signature": {…} or null}`.

The bytes are deterministic: keys are sorted, there are no blanks, and a line feed ends them. The signature covers
SIGNED and the canonical bytes of `certificate`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

from spark.certificate.signing import Signer, is_signed
from spark.certificate.tree import COLUMNS_OF, buckets_in, root_of, table_of

# A signature of a certificate is never a signature of anything else by the same key.
SIGNED = b"halfnote certificate 1\n"
ALGORITHM = "ed25519"
NEEDED = {
    "format", "day", "sequence", "previous", "seen_at", "receipts_before", "version", "rules", "counts", "tables",
    "root", "findings",
}  # fmt: skip


class NotACertificateError(Exception):
    """A file is no certificate; the text says why."""


@dataclass(frozen=True)
class Certificate:
    """A parsed certificate and its bytes. `signature`: `{algorithm, public_key, signature}`, or None."""

    text: str
    body: Mapping[str, Any]
    signature: Mapping[str, Any] | None

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Parse a document. Raises NotACertificateError."""
        try:
            whole = json.loads(text)
            body, signature = whole["certificate"], whole["signature"]
            missing = NEEDED - body.keys()
            if missing or body["format"] not in COLUMNS_OF:
                known = " or ".join(map(str, COLUMNS_OF))
                raise NotACertificateError(f"It is no certificate of format {known}.")
            if signature is not None:
                bytes.fromhex(signature["public_key"] + signature["signature"])
            if canonical(whole) != text:
                raise NotACertificateError("Its bytes were changed: it is not in canonical form.")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise NotACertificateError("It is no certificate: it is not complete JSON of that form.") from None
        return cls(text, body, signature)

    @property
    def digest(self) -> str:
        """The SHA-256 of the document's bytes, which the next certificate contains."""
        return digest_of(self.text)

    def faults(self) -> list[str]:
        """Return as texts what in the document contradicts itself; the rows are not looked at."""
        found = []
        tables = self.body["tables"]
        try:
            wrong = [name for name, one in tables.items() if table_of(buckets_in(one)) != one]
            findings = self.body["findings"]
            wrong += ["findings"] if table_of(buckets_in(findings)) != findings else []
            wrong += ["root"] if root_of({**tables, "finding": findings}) != self.body["root"] else []
        except (KeyError, TypeError, ValueError, AttributeError):
            return ["The digest tree is incomplete."]
        found += [f"The digest of {name} does not belong to the digests below it." for name in wrong]
        if self.signature is not None and not is_signed(
            signed_bytes(self.body), bytes.fromhex(self.signature["signature"]), self.signature["public_key"]
        ):
            found.append("The signature does not belong to the content.")
        return found


def digest_of(text: str) -> str:
    """Return the SHA-256 of a document."""
    return sha256(text.encode()).hexdigest()


def canonical(value: Any) -> str:
    """Return JSON as canonical text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def signed_bytes(body: Mapping[str, Any]) -> bytes:
    """Return the bytes that are signed."""
    return SIGNED + canonical(body).encode()


def written(body: Mapping[str, Any], signer: Signer | None) -> str:
    """Return the document of a certificate, unsigned without a signer. Raises SigningError."""
    signature = None
    if signer is not None:
        made = signer.sign(signed_bytes(body)).hex()
        signature = {"algorithm": ALGORITHM, "public_key": signer.public_key, "signature": made}
    return canonical({"certificate": body, "signature": signature})
