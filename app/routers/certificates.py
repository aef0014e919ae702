"""Certificates of final days. Only the nightly proof writes them."""

from datetime import date
from typing import Annotated

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response
from pydantic import Field

from app.errors import DayNotCertified, Invalid
from app.routers.dependencies import RuntimeDep, problems
from app.routers.reconciliation import Day
from app.schemas.certificates import CertificateEntry, CertificatePage, CertificateShown
from app.schemas.fields import Strict
from app.schemas.reconciliation import DAY
from app.store.proof.certificates import ABOVE_ALL, Stored, certificate_of, list_certificates

router = APIRouter(tags=["nightly proof"])

# Each is parsed, and may have some ten thousand characters.
PAGE_MAX = 100


class CertificateQuery(Strict):
    """A page of certificates."""

    since: Day = Field(date.min, description="of this day and later ones", examples=[DAY])
    before: int = Field(ABOVE_ALL, ge=1, le=ABOVE_ALL, description="`next_cursor` of the previous page")
    limit: int = Field(30, ge=1, le=PAGE_MAX, description="certificates on a page")


@router.get(
    "/reconciliation/certificates",
    summary="List the certificates of final days, the last one written first",
    responses=problems(Invalid),
)
async def list_of_certificates(runtime: RuntimeDep, query: Annotated[CertificateQuery, Query()]) -> CertificatePage:
    """Return a page of certificates without their digest trees, and whether each one continues the chain.

    Signatures are not verified here: `halfnote certificate verify` does that, without Halfnote's database.
    """
    async with runtime.request_pool.connection() as connection:
        rows, below = await list_certificates(connection, query.since, query.before, query.limit)
    return CertificatePage(items=[_entry(row) for row in rows], next_cursor=below)


@router.get(
    "/reconciliation/{day}/certificate",
    summary="Show the certificate of a final day",
    response_model=CertificateShown,
    responses=problems(DayNotCertified, Invalid),
)
async def get_certificate(
    runtime: RuntimeDep, day: Annotated[Day, Path(description="the day, in UTC", examples=[DAY])]
) -> Response:
    """Return a day's certificate, byte for byte as the nightly proof signed it.

    Store the bytes as they are: `halfnote certificate verify` verifies the file without Halfnote's database.
    """
    async with runtime.request_pool.connection() as connection:
        document = await certificate_of(connection, day)
    if document is None:
        raise DayNotCertified(
            f"{day} has no certificate. The nightly proof writes one when the day becomes final; "
            f"`halfnote reconcile --day {day}` writes one for a day that became final earlier."
        )
    return Response(document, media_type="application/json")


def _entry(row: Stored) -> CertificateEntry:
    return CertificateEntry(
        day=row.day, sequence=row.sequence, digest=row.digest, public_key=row.public_key, chain=row.chain
    )
