"""Ed25519 signatures of certificates, by a key in a file or by a command."""

import base64
import binascii
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

COMMAND_S = 60


class SigningError(Exception):
    """A key cannot be used; the text says why."""


@dataclass(frozen=True)
class Signer:
    """A public key as 64 hex digits, and the function that signs bytes. It raises SigningError."""

    public_key: str
    sign: Callable[[bytes], bytes]


def new_key(path: Path) -> str:
    """Write a new private key to a file that does not exist yet (mode 0600), and return the public key as PEM."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(pem)
    except OSError as error:
        raise SigningError(f"{path} cannot be written: {error.strerror}.") from None
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, spki).decode()


def signer_of_file(path: Path) -> Signer:
    """Return the signer of a private key in a PEM file."""
    try:
        key = serialization.load_pem_private_key(_read(path), None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningError(f"{path} is not a PEM file with an Ed25519 private key without a passphrase.")
    return Signer(_hex(key.public_key()), key.sign)


def signer_of_command(command: str, public_key: Path) -> Signer:
    """Return the signer that a command is: it gets the bytes on stdin and prints the signature in base64."""
    key = public_key_of(public_key)

    def sign(signed: bytes) -> bytes:
        signature = _printed(shlex.split(command), signed)
        if not is_signed(signed, signature, key):
            raise SigningError(f"{shlex.split(command)[0]} printed a signature that is not by the key in {public_key}.")
        return signature

    return Signer(key, sign)


def _printed(command: list[str], signed: bytes) -> bytes:
    try:
        done = subprocess.run(command, input=signed, capture_output=True, timeout=COMMAND_S, check=True)  # noqa: S603
        return base64.b64decode(done.stdout.strip(), validate=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise SigningError(f"{command[0]} ended with {error.returncode}: {said[-500:]}") from None
    except subprocess.TimeoutExpired:
        raise SigningError(f"{command[0]} did not end within {COMMAND_S} seconds.") from None
    except OSError as error:
        raise SigningError(f"{command[0]} cannot be run: {error.strerror}.") from None
    except binascii.Error:
        raise SigningError(f"{command[0]} did not print a signature in base64.") from None


def public_key_of(path: Path) -> str:
    """Return the public key in a PEM file, as 64 hex digits."""
    try:
        key = serialization.load_pem_public_key(_read(path))
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise SigningError(f"{path} is not a PEM file with an Ed25519 public key.")
    return _hex(key)


def is_signed(signed: bytes, signature: bytes, public_key: str) -> bool:
    """Return whether a signature of bytes is by the key of 64 hex digits."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True


def _hex(key: Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SigningError(f"{path} cannot be read: {error.strerror}.") from None
