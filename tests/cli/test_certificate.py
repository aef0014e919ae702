"""`halfnote certificate list` and `show` against a service, and `verify` of what `show` wrote."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest

from app.cli.certificate import show
from app.database.connection import connect
from spark.certificate.document import Certificate, digest_of, written
from spark.certificate.signing import new_key, signer_of_file
from spark.certificate.tree import FINDING, root_of, table_of
from tests.support.cli_runs import Run, run
from tests.support.proof_runs import looked_at

__all__ = ["run"]
DAY, MISSING = date(2026, 10, 27), date(2026, 10, 26)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The directory with a private and a public key."""
    (tmp_path / "key.pub").write_text(new_key(tmp_path / "key.pem"))
    return tmp_path


def certificate_of(day: date, keys: Path | None, sequence: int = 1, previous: str | None = None) -> str:
    """Return the certificate of an empty day; `previous` is the certificate before it, of the day before."""
    empty = table_of({})
    before = previous and {"day": str(day - timedelta(days=1)), "digest": digest_of(previous)}
    body = {
        "format": 1, "day": str(day), "sequence": sequence, "previous": before, "seen_at": "2026-11-03T01:17:00+00:00",
        "receipts_before": "2026-11-03T00:17:00+00:00", "version": "0.1.0", "rules": "00", "counts": {"half": 0},
        "tables": {"half": empty}, "findings": empty, "root": root_of({"half": empty, FINDING: empty}),
    }  # fmt: skip
    return written(body, signer_of_file(keys / "key.pem") if keys else None)


@pytest.fixture
def stored(database: str) -> Iterator[Callable[..., None]]:
    """A function that stores certificates of days from DAY on; they are deleted after the test, with the days."""

    async def put(documents: tuple[str, ...]) -> None:
        connection = await connect(database)
        for number, document in enumerate(documents):
            statement = "insert into day_certificate (sequence, day, run_id, document) values ($1, $2, 1, $3)"
            await connection.execute(statement, number + 1, DAY + timedelta(days=number), document)
        await connection.close()

    async def delete() -> None:
        connection = await connect(database)
        for table in ("day_certificate", "reconciliation_day"):
            await connection.execute(f"delete from {table}")
        await connection.close()

    yield lambda *documents: asyncio.run(put(documents))
    asyncio.run(delete())


@pytest.fixture
def document(stored: Callable[..., None], keys: Path) -> str:
    """The stored and signed certificate of DAY."""
    text = certificate_of(DAY, keys)
    stored(text)
    return text


def test_a_certificate_is_shown_byte_for_byte_and_verified(run: Run, document: str, keys: Path) -> None:
    file, key = keys / "day.json", keys / "key.pub"
    shown = run("certificate", "show", str(DAY), "--out", str(file))
    assert (shown.code, shown.out, shown.err) == (0, "", "")
    assert file.read_text() == document
    assert run("certificate", "verify", str(file), "--public-key", str(key)).code == 0
    file.write_text(document.replace('"version":"0.1.0"', '"version":"0.1.1"'))
    assert run("certificate", "verify", str(file), "--public-key", str(key)).code == 3


def test_it_is_printed_without_a_file(url: str, document: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(str(DAY), None, url)
    assert capsys.readouterr().out == document


def test_what_cannot_be_shown(run: Run, document: str, tmp_path: Path) -> None:
    missing = run("certificate", "show", str(MISSING))
    assert (missing.code, missing.out) == (1, "")
    assert f"{MISSING} has no certificate." in missing.err
    assert f"halfnote reconcile --day {MISSING}" in missing.err
    refused = run("certificate", "show", "yesterday")
    assert refused.code == 1
    assert "full-date" in refused.err
    unwritable = run("certificate", "show", str(DAY), "--out", str(tmp_path))
    assert unwritable.code == 1
    assert f"{tmp_path} cannot be written" in unwritable.err


def look_at(database: str, count: int) -> None:
    """Write that runs proved days from DAY on, of which the last is provisional."""

    async def write() -> None:
        connection = await connect(database)
        for number in range(count):
            state = "final" if number < count - 1 else "provisional"
            await looked_at(connection, DAY + timedelta(days=number), 1, state)
        await connection.close()

    asyncio.run(write())


def test_days_are_listed_with_state_key_and_chain(
    run: Run, stored: Callable[..., None], database: str, keys: Path
) -> None:
    first = certificate_of(DAY, None)
    second = certificate_of(DAY + timedelta(days=1), keys, 2, first)
    third = certificate_of(DAY + timedelta(days=2), keys, 3, second)
    stored(first, second, third)
    look_at(database, 4)
    key = Certificate.parsed(second).signature
    assert key is not None
    listed = run("certificate", "list")
    assert (listed.code, listed.err) == (0, "")
    assert [line.split() for line in listed.out.splitlines()] == [
        ["DAY", "STATE", "CERTIFICATE", "KEY", "CHAIN"],
        ["2026-10-30", "provisional", "none"],
        ["2026-10-29", "final", "3", key["public_key"][:16], "ok"],
        ["2026-10-28", "final", "2", key["public_key"][:16], "ok"],
        ["2026-10-27", "final", "1", "unsigned", "first"],
    ]
    # The certificate before the last of the list is fetched too.
    cut = run("certificate", "list", "--limit", "2", "--json").json["items"]
    assert [(one["day"], one["chain"]) for one in cut] == [("2026-10-30", None), ("2026-10-29", "ok")]
    assert cut[1]["public_key"] == key["public_key"]


def test_a_broken_chain_is_listed(run: Run, stored: Callable[..., None], database: str, keys: Path) -> None:
    first = certificate_of(DAY, keys)
    second = certificate_of(DAY + timedelta(days=1), keys, 2, first)
    third = certificate_of(DAY + timedelta(days=2), keys, 3, second)
    # The first was replaced, and the third has the number of another.
    stored(first.replace('"rules":"00"', '"rules":"01"'), second, third.replace('"sequence":3', '"sequence":4'))
    look_at(database, 4)
    listed = run("certificate", "list", "--json")
    assert listed.code == 3
    assert [one["chain"] for one in listed.json["items"]] == [None, "broken", "broken", "first"]
