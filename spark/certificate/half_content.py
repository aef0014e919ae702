"""Compares the content of half messages in Parquet files with their digests, which the certificate covers.

A certificate has the digest of each body, and the digest of each half, but not the body, the context and other columns
that the second covers. So these are compared here, if the files have them.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spark.certificate.parquet_rows import NoRowsError, directory_of, files_of
from spark.half_digest import StoredMessage, is_altered

# The bytes of bodies in memory at once; without a manifest, a body may be as large as LARGEST.
BODIES_AT_ONCE = 64 * 1024 * 1024
LARGEST = 4 * 1024 * 1024
ROWS_AT_ONCE = 4096
NAMED_AT_MOST = 5
BODY = ["transaction_id", "position", "body", "body_digest"]


def content_wrong(root: Path, body: Mapping[str, Any]) -> list[str]:
    """Return as texts which bodies and halves are not those of their digests; `body`: the certificate's.

    Raises NoRowsError if the files cannot be read.
    """
    place = directory_of(root, body["day"])
    if not (place / "half").is_dir():
        return []
    try:
        manifest = place / "manifest.json"
        described = json.loads(manifest.read_text()) if manifest.exists() else {}
        files = files_of(place, "half")
        return [*_short(_wrong_bodies(files, described)), *_short(_altered(files, is_archive=bool(described)))]
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
        raise NoRowsError(f"{place} cannot be read: {error}") from error


def _wrong_bodies(files: list[Path], described: Mapping[str, Any]) -> Iterator[str]:
    redacted = {one["message_id"] for one in described.get("redacted", ())}
    # An archive may be without bodies; a manifest says whether it is.
    needed = described.get("bodies", False)
    at_once = max(1, min(ROWS_AT_ONCE, BODIES_AT_ONCE // max(1, described.get("largest_body", LARGEST))))
    for file in files:
        with pq.ParquetFile(file) as opened:
            if "body" not in opened.schema_arrow.names:
                if needed:
                    yield f"half: {file.name} has no bodies, though the manifest says so"
                continue
            for batch in opened.iter_batches(at_once, columns=BODY):
                for one, position, content, digest in zip(
                    *(batch.column(name).to_pylist() for name in BODY), strict=True
                ):
                    message_id = f"{one}-{position}"
                    if content is None:
                        if needed and message_id not in redacted:
                            yield f"half: the body of {message_id} is missing, and no redaction is on record"
                    elif sha256(content).digest() != digest:
                        yield f"half: the body of {message_id} is not of its digest"


def _altered(files: list[Path], *, is_archive: bool) -> Iterator[str]:
    """Yield the transactions whose rows are not those of their half's digest, and files that cannot be compared.

    The files of an archive have all columns. Others, such as those that a proof kept, may have fewer: of them stderr
    names what is not compared.
    """
    # Those that do not match alone: a transaction may have rows in several files.
    rest: dict[str, list[StoredMessage]] = {}
    for file in files:
        with pq.ParquetFile(file) as opened:
            missing = ", ".join(sorted(set(StoredMessage._fields) - set(opened.schema_arrow.names)))
            if missing and is_archive:
                yield f"half: {file.name} lacks columns of an archive: {missing}"
            elif missing:
                print(f"half: the digests of {file.name} are not compared, because it lacks {missing}", file=sys.stderr)
            if missing:
                continue
            for one, messages in groupby(_messages(opened), key=lambda message: message.transaction_id):
                group = list(messages)
                if one in rest or is_altered(group):
                    rest.setdefault(one, []).extend(group)
    for one, group in sorted(rest.items()):
        group.sort(key=lambda message: message.position)
        if is_altered(group):
            yield f"half: the messages of {one} are not those of its digest"


def _messages(opened: pq.ParquetFile) -> Iterator[StoredMessage]:
    for batch in opened.iter_batches(columns=list(StoredMessage._fields)):
        columns = [batch.column(name).to_pylist() for name in StoredMessage._fields]
        yield from map(StoredMessage._make, zip(*columns, strict=True))


def _short(found: Iterator[str]) -> list[str]:
    words = list(found)
    more = len(words) - NAMED_AT_MOST
    return words[:NAMED_AT_MOST] + ([f"half: and {more} more"] if more > 0 else [])
