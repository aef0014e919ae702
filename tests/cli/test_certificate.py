"""`halfnote certificate show` against a service, and `verify` of what it wrote."""

import asyncio
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from app.cli.certificate import show
from app.database.connection import connect
from spark.certificate.document import written
from spark.certificate.signing import new_key, signer_of_file
from spark.certificate.tree import FINDING, root_of, table_of
from tests.support.cli_runs import Run, run

__all__ = ["run"]
DAY, MISSING = date(2026, 10, 30), date(2026, 10, 31)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The directory with a private and a public key."""
    (tmp_path / "key.pub").write_text(new_key(tmp_path / "key.pem"))
    return tmp_path


@pytest.fixture
def document(database: str, keys: Path) -> Iterator[str]:
    """The signed certificate of an empty day, which is deleted after the test."""
    empty = table_of({})
    body = {
        "format": 1, "day": str(DAY), "sequence": 1, "previous": None, "seen_at": "2026-11-03T01:17:00+00:00",
        "receipts_before": "2026-11-03T00:17:00+00:00", "version": "0.1.0", "rules": "00", "counts": {"half": 0},
        "tables": {"half": empty}, "findings": empty, "root": root_of({"half": empty, FINDING: empty}),
    }  # fmt: skip
    text = written(body, signer_of_file(keys / "key.pem"))

    async def execute(statement: str, *values: object) -> None:
        connection = await connect(database)
        await connection.execute(statement, *values)
        await connection.close()

    put = "insert into day_certificate (sequence, day, run_id, document) values (1, $1, 1, $2)"
    asyncio.run(execute(put, DAY, text))
    yield text
    asyncio.run(execute("delete from day_certificate"))


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
