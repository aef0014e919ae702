"""A certificate authority for tests, and the certificates that it issues."""

import contextlib
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Pair:
    """A certificate and its key in PEM form, and the certificate's serial number."""

    certificate: bytes
    key: bytes
    serial: int

    def write(self, directory: Path) -> tuple[Path, Path]:
        """Write both as a Kubernetes Secret of the type TLS has them; return their paths."""
        directory.mkdir(parents=True, exist_ok=True)
        certificate, key = directory / "tls.crt", directory / "tls.key"
        certificate.write_bytes(self.certificate)
        key.touch(mode=0o600)
        key.write_bytes(self.key)
        return certificate, key


class Authority:
    """A private CA; its certificate is in `file`."""

    def __init__(self, directory: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
        # OpenSSL wants the identifiers of strict verification, which is Python's default from 3.13 on.
        certificate = (
            self._builder(self._name, self._key, timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(False, False, False, False, False, True, True, False, False),
                critical=True,
            )
            .sign(self._key, hashes.SHA256())
        )
        directory.mkdir(parents=True, exist_ok=True)
        self.file = directory / "ca.crt"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(self, *names: str, valid: timedelta = timedelta(hours=1)) -> Pair:
        """Issue a certificate for DNS names and IP addresses; with a negative validity it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = [
            x509.IPAddress(ip_address(name)) if name[:1].isdigit() else x509.DNSName(name) for name in names
        ]
        certificate = (
            self._builder(subject, key, valid)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Pair(certificate.public_bytes(Encoding.PEM), plain, certificate.serial_number)

    def client_context(self) -> ssl.SSLContext:
        """Return a context that trusts this CA alone."""
        return ssl.create_default_context(cafile=self.file)

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + valid)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )


def client_hello() -> bytes:
    """Return the first flight of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()
