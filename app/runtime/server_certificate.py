"""The service's own certificate and key: loads them, and loads them again when their files change."""

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

CERT, KEY = "HALFNOTE_TLS_CERT", "HALFNOTE_TLS_KEY"
ENCRYPTED = re.compile(rb"ENCRYPTED")
# The permission of every user of the machine to read a file.
WORLD_READABLE = 0o004
# Files that are replaced while they are read are read again, so many times.
_READS_AT_MOST = 3


Content: TypeAlias = tuple[bytes, bytes]


class BadCertificate(Exception):
    """The files of the certificate and the key are unusable; the message says why and what to do.

    `content`: what the two files contained, None if they could not be read or changed meanwhile.
    """

    def __init__(self, reason: str, content: Content | None = None) -> None:
        super().__init__(reason)
        self.content = content


@dataclass(frozen=True, slots=True)
class LoadedPair:
    """A context for handshakes, what the files contained, and until when the certificate is valid."""

    context: ssl.SSLContext
    content: Content
    expires_at: datetime


class ServerCertificate:
    """The pair that new connections use. Connections that are open keep the pair that they began with."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Load the files. Raises BadCertificate."""
        self._paths = certificate, key
        self._pair = load(certificate, key)
        self._is_key_world_readable = _is_world_readable(key)
        # Why the files that are there now are not used.
        self.fault: str | None = None
        # Their content, which is not judged again at each turn.
        self._refused: Content | None = None

    @property
    def context(self) -> ssl.SSLContext:
        """The context for the next handshake."""
        return self._pair.context

    @property
    def file(self) -> str:
        """The path of the certificate."""
        return str(self._paths[0])

    @property
    def expires_at(self) -> datetime:
        """The end of the certificate's validity."""
        return self._pair.expires_at

    def reload(self) -> bool:
        """Load the files if their content changed. Return whether there was something new: a pair, or a fault of one.

        A kubelet replaces a mounted Secret by changing a symbolic link, and others write in place, so the content
        decides and not the time of a change.
        """
        try:
            content = _read(*self._paths)
            self._is_key_world_readable = _is_world_readable(self._paths[1])
            if content == self._pair.content:
                had_fault, self.fault, self._refused = self.fault is not None, None, None
                return had_fault
            if content == self._refused:
                return False
            self._pair = load(*self._paths)
        except BadCertificate as error:
            is_new, self.fault, self._refused = str(error) != self.fault, str(error), error.content
            return is_new
        self.fault, self._refused = None, None
        return True

    def warnings(self, now: datetime) -> Iterator[str]:
        """Yield what a person must change."""
        if self.fault is not None:
            yield f"{self.fault} Until then the former certificate is served, which is valid until {self._until()}."
        if self.expires_at <= now:
            yield f"{CERT}: the certificate expired at {self._until()}: clients refuse it. Replace the files."
        if self._is_key_world_readable:
            yield f"{KEY}: every user of the machine can read {self._paths[1]}: `chmod o-r` it."

    def _until(self) -> str:
        return self.expires_at.isoformat(" ", "seconds")


def load(certificate: Path, key: Path) -> LoadedPair:
    """Load a pair into a new context: one that has loaded a bad pair has lost the former one. Raises BadCertificate."""
    for _ in range(_READS_AT_MOST):
        content = _read(certificate, key)
        found: LoadedPair | BadCertificate
        try:
            found = _pair_of(certificate, key, content)
        except BadCertificate as error:
            found = BadCertificate(str(error), content)
        # OpenSSL reads the files itself, and both may be replaced between the readings of one and of the other.
        if _read(certificate, key) != content:
            continue
        if isinstance(found, BadCertificate):
            raise found
        return found
    raise BadCertificate(f"{CERT} and {KEY} change while they are read. Replace both files at once.")


def _pair_of(certificate: Path, key: Path, content: Content) -> LoadedPair:
    expires_at = _checked(certificate, key, *content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could make the service repeat the costly part of a handshake on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        # `ssl.SSLError` is one: for example a key that OpenSSL takes for too weak.
        raise BadCertificate(f"{CERT} and {KEY} cannot be used: {error.strerror or error}.") from None
    return LoadedPair(context, content, expires_at)


def _is_world_readable(key: Path) -> bool:
    try:
        return bool(key.stat().st_mode & WORLD_READABLE)
    except OSError as error:
        raise BadCertificate(f"{KEY}: {key} cannot be read: {error.strerror}.") from None


def _read(certificate: Path, key: Path) -> Content:
    return _content(CERT, certificate), _content(KEY, key)


def _content(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadCertificate(f"{setting}: {path} cannot be read: {error.strerror}.") from None


def _checked(certificate: Path, key: Path, chain_pem: bytes, key_pem: bytes) -> datetime:
    """Return the end of the first certificate's validity. Raises BadCertificate."""
    try:
        own = x509.load_pem_x509_certificates(chain_pem)[0]
        public_key = own.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadCertificate(f"{CERT}: {certificate} has no certificate in PEM form: {error}.") from None
    if ENCRYPTED.search(key_pem):
        raise BadCertificate(
            f"{KEY}: the key in {key} is encrypted, and there is no setting for its passphrase. Write it in plain "
            f"text with `openssl pkey -in {key} -out …` to a file that only the service can read."
        )
    try:
        private = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadCertificate(f"{KEY}: {key} has no private key in PEM form: {error}.") from None
    if private.public_key() != public_key:
        raise BadCertificate(
            f"{KEY}: the key in {key} does not belong to the first certificate in {certificate}. Name the two files "
            "that were made together; the service's own certificate comes first in its file."
        )
    return own.not_valid_after_utc
