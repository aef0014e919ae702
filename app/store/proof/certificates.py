"""Read the certificates that the nightly proof wrote: one row for each final day."""

from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

import msgspec

from app.database.connection import Connection

# By day_certificate_day.
CERTIFICATE = "select document from day_certificate where day = $1"
# By primary key, backwards; the one before it by primary key too. A day that was certified late is in its place of the
# chain, so `since` filters rows of some years at most.
PAGE = """
select c.sequence, c.day, c.document, encode(sha256(convert_to(c.document, 'UTF8')), 'hex') as digest,
  p.day as previous_day, encode(sha256(convert_to(p.document, 'UTF8')), 'hex') as previous_digest
from day_certificate c left join day_certificate p on p.sequence = c.sequence - 1
where c.day >= $1 and c.sequence < $2 order by c.sequence desc limit $3
"""
# Above every number of a certificate.
ABOVE_ALL = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Stored:
    """A certificate, and whether it continues the chain. `public_key` is what it says of itself."""

    sequence: int
    day: date
    digest: str
    public_key: str | None
    chain: Literal["first", "ok", "broken"]


class _Previous(msgspec.Struct):
    day: str
    digest: str


class _Body(msgspec.Struct):
    day: str
    sequence: int
    previous: _Previous | None


class _Signature(msgspec.Struct):
    public_key: str


class _Document(msgspec.Struct):
    certificate: _Body
    signature: _Signature | None


async def certificate_of(connection: Connection, day: date) -> str | None:
    """Return the text of a day's certificate, or None if it has none."""
    document: str | None = await connection.fetchval(CERTIFICATE, day)
    return document


async def list_certificates(
    connection: Connection, since: date, below: int, limit: int
) -> tuple[list[Stored], int | None]:
    """Return up to `limit` certificates of days since one, the last one first, and where the next page begins."""
    rows = [_stored(row) for row in await connection.fetch(PAGE, since, below, limit + 1)]
    return rows[:limit], rows[limit - 1].sequence if len(rows) > limit else None


def _stored(row: Any) -> Stored:
    try:
        found = msgspec.json.decode(row["document"], type=_Document)
    except msgspec.MsgspecError:
        return Stored(row["sequence"], row["day"], row["digest"], None, "broken")
    key = found.signature.public_key if found.signature else None
    return Stored(row["sequence"], row["day"], row["digest"], key, _chain(row, found.certificate))


def _chain(row: Any, body: _Body) -> Literal["first", "ok", "broken"]:
    if (body.day, body.sequence) != (str(row["day"]), row["sequence"]):
        return "broken"
    if body.previous is None:
        return "first" if body.sequence == 1 else "broken"
    before = (str(row["previous_day"]), row["previous_digest"])
    return "ok" if (body.previous.day, body.previous.digest) == before else "broken"
