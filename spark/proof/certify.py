"""Certifies the days that a run made final, and compares days that were certified earlier with their certificates.

A provisional day gets none, because its rows still change legally. A day gets one certificate; no later run replaces
it. Certificates are a chain in the order of their writing, which is not always the order of the days: a parked
transaction keeps a day provisional while later days become final.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import spark.transforms
from spark.certificate.document import Certificate, NotACertificateError, digest_of, written
from spark.certificate.signing import Signer, SigningError
from spark.certificate.tree import COLUMNS, FINDING, FORMAT, differences, root_of, table_of
from spark.engine.filesystem import FAILURES
from spark.engine.progress import Progress
from spark.errors import RunFailedError
from spark.postgres.connections import Connection
from spark.proof.prove_day import ProvedDay, ReadDay
from spark.sources import audit_chain
from spark.sources.failures import root_cause
from spark.transforms.certified import findings_table, tables_of

# A receipt of this age is in every snapshot: it is committed seconds after its `settled_at`, by another clock.
RECEIPTS_OLDER = timedelta(hours=1)
DISTRIBUTION = "halfnote-server"
STORED = "select day, document from day_certificate"
# Primary key, backwards.
LAST = "select sequence, day, document from day_certificate order by sequence desc limit 1"
PUT = "insert into day_certificate (sequence, day, run_id, document) values (%s, %s, %s, %s)"


@dataclass(frozen=True)
class Made:
    """What a certificate says of a day, without its place in the chain."""

    day: date
    body: Mapping[str, Any]


def stored(connection: Connection) -> dict[date, str]:
    """Return the documents of all certificates by day."""
    return {row["day"]: row["document"] for row in connection.execute(STORED)}


def compared(read: ReadDay, document: str | None, progress: Progress) -> ReadDay:
    """Return a day with its differences from its certificate, which the rule certificate_differs reports."""
    if document is None:
        return read
    with progress.stage("certificate", read.frames.day):
        try:
            certificate = Certificate.parsed(document)
            faults = certificate.faults()
            if certificate.body["day"] != str(read.frames.day):
                faults.append(f"It is the certificate of {certificate.body['day']}.")
        except NotACertificateError as error:
            return replace(read, frames=replace(read.frames, certified=[{"fault": str(error)}]))
        before = datetime.fromisoformat(certificate.body["receipts_before"])
        found = differences(certificate.body["tables"], _tables(read, before, certificate.body["format"]))
        differing = [*found, *([{"fault": " ".join(faults)}] if faults else [])]
    return replace(read, frames=replace(read.frames, certified=differing))


def _tables(read: ReadDay, before: datetime, format_: int) -> dict[str, dict[str, Any]]:
    if not any(read.frames.rows.get(table, 1) for table in COLUMNS):
        return {table: table_of({}) for table in COLUMNS}
    try:
        return tables_of(read.frames, before, format_)
    except FAILURES as error:
        raise RunFailedError(f"The day {read.frames.day} cannot be certified: {root_cause(str(error))}") from error


def certified(read: ReadDay, proved: ProvedDay, progress: Progress, installation: str) -> Made | None:
    """Return what the certificate of a day says; None for a day that is not final or has a certificate.

    `installation`: its name; empty: none was given.
    """
    if proved.result.state != "final" or read.frames.certified is not None:
        return None
    with progress.stage("certificate", read.frames.day) as stage:
        before = read.frames.seen_at - RECEIPTS_OLDER
        tables = _tables(read, before, FORMAT)
        findings = findings_table(proved.findings) if proved.result.found else table_of({})
        stage.rows = sum(table["rows"] for table in tables.values())
    return Made(
        read.frames.day,
        {
            "format": FORMAT,
            "day": str(read.frames.day),
            "installation": installation or None,
            "seen_at": read.frames.seen_at.isoformat(),
            "receipts_before": before.isoformat(),
            "version": _version(),
            "rules": rules_digest(),
            "counts": dict(proved.result.counts),
            "tables": tables,
            "findings": findings,
            "root": root_of({**tables, FINDING: findings}),
        },
    )


def write(
    connection: Connection, run_id: int, made: Iterable[Made], signer: Signer | None, audit_keep_s: int
) -> dict[date, str]:
    """Write certificates at the end of the chain, in the run's database transaction; return the documents by day.

    Each names the last row of the audit and says how long rows are kept, so that a later run finds an audit that lost
    its end, or its beginning too early. Raises RunFailedError if a certificate cannot be signed.
    """
    row = connection.execute(LAST).fetchone()
    sequence = row["sequence"] if row else 0
    previous = {"day": str(row["day"]), "digest": digest_of(row["document"])} if row else None
    documents = {}
    audit = audit_chain.certified(connection, audit_keep_s)
    for one in made:
        sequence += 1
        try:
            text = written({**one.body, "audit": audit, "sequence": sequence, "previous": previous}, signer)
        except SigningError as error:
            raise RunFailedError(f"The certificate of {one.day} cannot be signed: {error}") from error
        connection.execute(PUT, [sequence, one.day, run_id, text])
        previous = {"day": str(one.day), "digest": digest_of(text)}
        documents[one.day] = text
    return documents


def rules_digest() -> str:
    """Return the SHA-256 over the source of all rules, by name."""
    total = sha256()
    place = Path(spark.transforms.__file__).parent
    for file in sorted(place.rglob("*.py")):
        total.update(f"{file.relative_to(place).as_posix()}:{sha256(file.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
