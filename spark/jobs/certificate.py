"""`halfnote certificate new-key` and `verify`: a key for certificates, and their verification without a database.

Exit status: 0: done, or nothing differs; 3: something differs; 1: it failed; 2: wrong usage. Needs no Java and no
PySpark; `--parquet` needs pyarrow.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark.certificate.document import Certificate, NotACertificateError
from spark.certificate.signing import SigningError, new_key, public_key_of
from spark.certificate.tree import FINDING, differences

INTACT, FAILED, USAGE, DIFFERS = 0, 1, 2, 3


def parser() -> argparse.ArgumentParser:
    """Return the parser of both commands."""
    made = argparse.ArgumentParser(prog="halfnote certificate", description="Certificates of days.")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    key = commands.add_parser("new-key", help="write a new signing key to FILE (mode 0600); print its public key")
    key.add_argument("file", type=Path, metavar="FILE")
    verify = commands.add_parser("verify", help="verify the certificate in FILE; exit status 3 if anything differs")
    verify.add_argument("file", type=Path, metavar="FILE")
    rows = "compare with an archive, frames of --keep-staging, or the findings of the proof's --out"
    verify.add_argument("--parquet", type=Path, action="append", default=[], metavar="DIR", help=rows)
    trusted = "PEM file of the public key; without it anyone could have signed"
    verify.add_argument("--public-key", type=Path, metavar="FILE", help=trusted)
    verify.add_argument("--previous", type=Path, metavar="FILE", help="the certificate before this one")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    given = parser().parse_args(argv)
    try:
        if given.command == "new-key":
            print(new_key(given.file), end="")
            return INTACT
        return _verify(given)
    except SigningError as error:
        print(error, file=sys.stderr)
        return USAGE


def _verify(given: argparse.Namespace) -> int:
    key = public_key_of(given.public_key) if given.public_key else None
    try:
        certificate = _certificate(given.file)
        previous = _certificate(given.previous) if given.previous else None
    except OSError as error:
        print(f"{error.filename} cannot be read: {error.strerror}.", file=sys.stderr)
        return USAGE
    except NotACertificateError as error:
        print(error)
        return DIFFERS
    found = certificate.faults() + _signed_wrong(certificate, key)
    if previous is not None:
        found += _chain_wrong(certificate, previous)
    for directory in given.parquet:
        # Imported here: a certificate alone is verified without pyarrow.
        from spark.certificate.half_content import content_wrong
        from spark.certificate.parquet_rows import NoRowsError, read_tables

        try:
            found += rows_wrong(certificate.body, read_tables(directory, certificate.body))
            found += content_wrong(directory, certificate.body)
        except NoRowsError as error:
            print(error, file=sys.stderr)
            return FAILED
    return _said(certificate, key, found)


def _certificate(path: Path) -> Certificate:
    try:
        return Certificate.parsed(path.read_bytes().decode())
    except (UnicodeDecodeError, NotACertificateError) as error:
        said = "It is no text." if isinstance(error, UnicodeDecodeError) else error
        raise NotACertificateError(f"{path}: {said}") from None


def _signed_wrong(certificate: Certificate, key: str | None) -> list[str]:
    if key is None:
        return []
    if certificate.signature is None:
        return ["It is not signed."]
    return [] if certificate.signature["public_key"] == key else ["It is signed by another key."]


def _chain_wrong(certificate: Certificate, previous: Certificate) -> list[str]:
    expected = {"day": previous.body["day"], "digest": previous.digest}
    found = [f"The certificate before it: {fault}" for fault in previous.faults()]
    if certificate.body["previous"] != expected:
        found.append(f"The certificate before it is not the one of {previous.body['day']} that was given.")
    elif certificate.body["sequence"] != previous.body["sequence"] + 1:
        found.append("Its number does not follow the number of the certificate before it.")
    return found


def rows_wrong(body: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return as texts which buckets of the found tables differ from the certified ones."""
    certified = {**body["tables"], FINDING: body["findings"]}
    differing = differences({name: certified[name] for name in found}, found)
    return [
        f"{one['table']}: rows with ids {one['ids']}… "
        + (f"({one['from']} to {one['to']}) " if "from" in one else "")
        + f"differ: {one['certified_rows']} certified, {one['found_rows']} found"
        for one in differing
    ]


def _said(certificate: Certificate, key: str | None, found: Sequence[str]) -> int:
    for one in found:
        print(one)
    of = certificate.body.get("installation")
    name = f"The certificate {certificate.body['sequence']} of {certificate.body['day']}" + (f" in {of}" if of else "")
    if found:
        print(f"{name} differs in {len(found)} places.")
        return DIFFERS
    signed = "unsigned"
    if certificate.signature is not None:
        whose = "the given key" if key else "a key that was not compared"
        signed = f"signed by {whose} ({certificate.signature['public_key']})"
    print(f"{name} is intact; {signed}; SHA-256 {certificate.digest}")
    return INTACT


if __name__ == "__main__":
    sys.exit(main())
