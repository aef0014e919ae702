"""Both clients of certificates against the real service in this process."""

import asyncio
from datetime import date, timedelta
from pathlib import Path

import pytest
from halfnote import Refused
from halfnote.certificates import Certificate, CertificateEntry, Certificates, SyncCertificates

from app.database.connection import Connection
from app.runtime.state import Runtime
from spark.certificate.document import Certificate as Parsed
from spark.certificate.document import written
from spark.certificate.signing import new_key, signer_of_file
from spark.certificate.tree import FINDING, FORMAT, root_of, table_of
from tests.sdk.in_process import FromThreads, service

FIRST = date(2026, 7, 1)


@pytest.fixture
async def documents(db: Connection, tmp_path: Path) -> list[str]:
    """The certificates of 105 days, more than a page has, as the proof writes them; all but the first are signed."""
    new_key(tmp_path / "key.pem")
    signer, made = signer_of_file(tmp_path / "key.pem"), []
    empty = table_of({})
    same = {
        "format": FORMAT, "seen_at": "2026-11-03T01:17:00+00:00", "receipts_before": "2026-11-03T00:17:00+00:00",
        "version": "0.1.0", "rules": "00", "counts": {"half": 0}, "tables": {"half": empty}, "findings": empty,
        "root": root_of({"half": empty, FINDING: empty}),
    }  # fmt: skip
    for number in range(105):
        day = FIRST + timedelta(days=number)
        previous = {"day": str(day - timedelta(days=1)), "digest": Parsed.parsed(made[-1]).digest} if made else None
        body = same | {"day": str(day), "sequence": number + 1, "previous": previous}
        made.append(written(body, signer if made else None))
        statement = "insert into day_certificate (sequence, day, run_id, document) values ($1, $2, 1, $3)"
        await db.execute(statement, number + 1, day, made[-1])
    return made


def told(document: str) -> CertificateEntry:
    said = Parsed.parsed(document)
    key, sequence = said.signature and said.signature["public_key"], said.body["sequence"]
    chain = "first" if sequence == 1 else "ok"
    return CertificateEntry(date.fromisoformat(said.body["day"]), sequence, said.digest, key, chain)  # type: ignore[arg-type]


async def test_the_asynchronous_client(runtime: Runtime, documents: list[str]) -> None:
    async with Certificates("http://localhost", transport=service(runtime)) as client:
        verify(await client.fetch(FIRST + timedelta(days=7)), documents[7])
        assert await client.entries() == [told(one) for one in reversed(documents)]
        assert await client.entries(FIRST + timedelta(days=100)) == [told(one) for one in reversed(documents[100:])]
        with pytest.raises(Refused) as refused:
            await client.fetch(FIRST - timedelta(days=1))
        assert refused.value.problem.type == "day-not-certified"


async def test_the_synchronous_client(runtime: Runtime, documents: list[str]) -> None:
    def work() -> None:
        with SyncCertificates("http://localhost", transport=transport) as client:
            verify(client.fetch(FIRST), documents[0])
            assert client.entries() == [told(one) for one in reversed(documents)]
            with pytest.raises(Refused, match="day-not-certified"):
                client.fetch(FIRST - timedelta(days=1))

    transport = FromThreads(service(runtime))
    await asyncio.to_thread(work)


def verify(fetched: Certificate, document: str) -> None:
    said = Parsed.parsed(document)
    assert (fetched.text, fetched.digest) == (document, said.digest)
    assert (fetched.certificate, fetched.signature) == (said.body, said.signature)
