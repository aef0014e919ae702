"""The certificate's document, tree and signature, and `halfnote certificate`, without Spark and without a database."""

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark.certificate.document import Certificate, NotACertificateError, written
from spark.certificate.parquet_rows import read_tables
from spark.certificate.signing import SigningError, new_key, signer_of_command, signer_of_file
from spark.certificate.tree import COLUMNS, COLUMNS_OF, FINDING, FINDINGS, FORMAT, root_of
from spark.jobs.certificate import main

DAY = "2026-11-20"
AT = datetime(2026, 11, 20, 12, tzinfo=UTC)
BEFORE = datetime(2026, 11, 24, tzinfo=UTC)
VALUES: dict[str, Any] = {"text": "shop", "int": 1, "bytes": b"\x00\xff", "time": AT}
TYPES = {"text": pa.string(), "int": pa.int64(), "bytes": pa.binary(), "time": pa.timestamp("us", "UTC")}
Rows = dict[str, list[dict[str, Any]]]
Change = Callable[[Rows], Any]


def id_of(number: int) -> str:
    digits = f"{int(AT.timestamp() * 1000) + number * 1_000_000:012x}"
    return f"{digits[:8]}-{digits[8:]}-7000-8000-{number:012x}"


def day_rows() -> Rows:
    """Ten rows of each table, seventeen minutes apart, and a finding."""
    made: Rows = {}
    for table, columns in COLUMNS.items():
        row = {name: VALUES[kind] for name, kind in columns}
        made[table] = [row | {"transaction_id": id_of(number)} for number in range(10)]
    for row in made["half"]:
        row["position"] = 0
    made[FINDING] = [{name: "parked" if kind == "text" else 0 for name, kind in FINDINGS}]
    return made


def write_rows(place: Path, rows: Rows) -> Path:
    for table, columns in (*COLUMNS.items(), (FINDING, FINDINGS)):
        directory = place / f"findings/day={DAY}" if table == FINDING else place / table
        directory.mkdir(parents=True)
        schema = pa.schema([(name, TYPES[kind]) for name, kind in columns])
        pq.write_table(pa.Table.from_pylist(rows[table], schema), directory / "part-0.parquet")
    return place


def body_of(
    place: Path, sequence: int = 1, previous: Any = None, day: str = DAY, format: int = FORMAT
) -> dict[str, Any]:
    said = {"format": format, "day": DAY, "receipts_before": BEFORE.isoformat()}
    tables = read_tables(place, said)
    whole = {"root": root_of(tables), "findings": tables.pop(FINDING), "tables": tables}
    beside = {"seen_at": BEFORE.isoformat(), "version": "0.1.0", "rules": "00", "counts": {"half": 10}}
    return said | whole | beside | {"sequence": sequence, "previous": previous, "day": day}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private key and its public key."""
    public = tmp_path / "key.pub"
    public.write_text(new_key(tmp_path / "key.pem"))
    return tmp_path / "key.pem", public


def certify(tmp_path: Path, key: Path | None, **columns: Any) -> Path:
    place = write_rows(tmp_path / "rows", day_rows()) if not (tmp_path / "rows").exists() else tmp_path / "rows"
    file = tmp_path / f"{len(list(tmp_path.glob('*.json')))}.json"
    file.write_text(written(body_of(place, **columns), signer_of_file(key) if key else None))
    return file


def verify(*arguments: object) -> int:
    return main(["verify", *map(str, arguments)])


def test_an_intact_day_is_verified(tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    file = certify(tmp_path, keys[0])
    assert verify(file, "--public-key", keys[1], "--parquet", tmp_path / "rows") == 0
    assert "is intact; signed by the given key" in capsys.readouterr().out
    assert verify(certify(tmp_path, None)) == 0
    assert "unsigned" in capsys.readouterr().out
    assert file.read_text() == certify(tmp_path, keys[0]).read_text()
    assert keys[0].stat().st_mode & 0o777 == 0o600


def another_verdict(rows: Rows) -> None:
    rows["op"][4]["verdict"] = 2


def no_receipt(rows: Rows) -> None:
    del rows["receipt"][4]


def invented_half(rows: Rows) -> None:
    rows["half"].append(rows["half"][4] | {"position": 1})


def swapped_topics(rows: Rows) -> None:
    rows["outbox"][4] |= {"topic": "2:ab", "tag": None}


def another_key(rows: Rows) -> None:
    rows["outbox"][4]["key"] = "another"


def another_actor(rows: Rows) -> None:
    rows["op"][4]["actor"] = None


def another_reason(rows: Rows) -> None:
    rows["op"][4]["reason"] = ""


def another_status(rows: Rows) -> None:
    rows["receipt"][4]["status"] = 204


def another_duration(rows: Rows) -> None:
    rows["receipt"][4]["duration_ms"] = None


def doubled(rows: Rows) -> None:
    rows["op"].append(rows["op"][4])


@pytest.mark.parametrize(
    ("change", "table", "counts"),
    [
        (another_verdict, "op", "1 certified, 1 found"),
        (no_receipt, "receipt", "1 certified, 0 found"),
        (invented_half, "half", "1 certified, 2 found"),
        (swapped_topics, "outbox", "1 certified, 1 found"),
        (doubled, "op", "1 certified, 2 found"),
        (another_key, "outbox", "1 certified, 1 found"),
        (another_actor, "op", "1 certified, 1 found"),
        (another_reason, "op", "1 certified, 1 found"),
        (another_status, "receipt", "1 certified, 1 found"),
        (another_duration, "receipt", "1 certified, 1 found"),
    ],
)
def test_a_changed_row_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Change, table: str, counts: str
) -> None:
    file, rows = certify(tmp_path, None), day_rows()
    change(rows)
    assert verify(file, "--parquet", write_rows(tmp_path / "changed", rows)) == 3
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{table}: rows with ids {id_of(4)[:7]}… (2026-11-20T13:")
    assert first.endswith(counts)
    assert last.endswith("differs in 1 places.")


def test_certificates_of_the_first_format_are_verified_by_its_columns(
    tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file, rows = certify(tmp_path, keys[0], format=1), day_rows()
    assert verify(file, "--public-key", keys[1], "--parquet", tmp_path / "rows") == 0
    for change in (another_key, another_actor, another_reason, another_status, another_duration):
        change(rows)
    assert verify(file, "--parquet", write_rows(tmp_path / "beyond", rows)) == 0
    another_verdict(rows)
    assert verify(file, "--parquet", write_rows(tmp_path / "changed", rows)) == 3
    # The text of a leaf of the first format never changes.
    assert [name for name, _ in COLUMNS_OF[1]["op"]] == ["transaction_id", "verdict", "source", "decided_at"]
    file.write_text(altered(file.read_text(), lambda it: it["certificate"].update(format=4)))
    capsys.readouterr()
    assert verify(file) == 3
    assert "It is no certificate of format 1 or 2 or 3." in capsys.readouterr().out


def test_an_altered_finding_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, rows = certify(tmp_path, None), day_rows()
    rows[FINDING][0]["subject"] = "another"
    assert verify(file, "--parquet", write_rows(tmp_path / "changed", rows)) == 3
    assert "finding: rows with ids parked… differ" in capsys.readouterr().out


def test_later_receipts_are_legal(tmp_path: Path) -> None:
    file, rows = certify(tmp_path, None), day_rows()
    rows["receipt"].append(rows["receipt"][3] | {"replay": 7, "settled_at": BEFORE + timedelta(days=3)})
    assert verify(file, "--parquet", write_rows(tmp_path / "changed", rows)) == 0


def altered(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    whole = json.loads(text)
    change(whole)
    return json.dumps(whole, sort_keys=True, separators=(",", ":")) + "\n"


def fewer_findings(whole: dict[str, Any]) -> None:
    whole["certificate"]["findings"] = {**whole["certificate"]["findings"], "rows": 0, "buckets": {}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-300], "not complete JSON"),
        (lambda text: text.replace(",", ", ", 1), "not in canonical form"),
        (lambda text: altered(text, fewer_findings), "The digest of findings does not belong"),
        (lambda text: altered(text, lambda it: it["certificate"].update(day="2026-11-21")), "The signature does not"),
        (lambda text: altered(text, lambda it: it["certificate"].update(rules="01")), "The signature does not"),
        (lambda text: altered(text, lambda it: it.update(signature=None)), "It is not signed"),
    ],
)
def test_a_changed_file_is_found(
    tmp_path: Path,
    keys: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[str], str],
    says: str,
) -> None:
    file = certify(tmp_path, keys[0])
    file.write_text(change(file.read_text()))
    assert verify(file, "--public-key", keys[1]) == 3
    assert says in capsys.readouterr().out


def test_another_key_is_found(tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.pub"
    other.write_text(new_key(tmp_path / "other.pem"))
    assert verify(certify(tmp_path, keys[0]), "--public-key", other) == 3
    assert "signed by another key" in capsys.readouterr().out


def test_swapped_days_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = certify(tmp_path, None)
    previous = {"day": DAY, "digest": Certificate.parsed(first.read_text()).digest}
    second = certify(tmp_path, None, sequence=2, previous=previous, day="2026-11-21")
    assert verify(second, "--previous", first) == 0
    assert verify(first, "--previous", second) == 3
    assert "is not the one of 2026-11-21 that was given" in capsys.readouterr().out
    first.write_text(altered(first.read_text(), lambda it: it["certificate"].update(version="0.1.1")))
    assert verify(second, "--previous", first) == 3


def test_a_command_signs(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    program = tmp_path / "kms.py"
    program.write_text(
        "import base64, sys\nfrom pathlib import Path\nfrom spark.certificate.signing import signer_of_file\n"
        f"print(base64.b64encode(signer_of_file(Path({str(keys[0])!r})).sign(sys.stdin.buffer.read())).decode())\n"
    )
    signed = signer_of_command(f"{sys.executable} {program}", keys[1]).sign(b"bytes")
    assert signed == signer_of_file(keys[0]).sign(b"bytes")

    other = tmp_path / "other.pub"
    other.write_text(new_key(tmp_path / "other.pem"))
    with pytest.raises(SigningError, match="not by the key"):
        signer_of_command(f"{sys.executable} {program}", other).sign(b"bytes")
    with pytest.raises(SigningError, match="ended with 1"):
        signer_of_command("false", other).sign(b"bytes")
    with pytest.raises(SigningError, match="cannot be run"):
        signer_of_command("/no/such/command", other).sign(b"bytes")
    with pytest.raises(SigningError, match="base64"):
        signer_of_command("echo !", other).sign(b"bytes")


def test_openssl_reads_the_keys_and_verifies(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    (tmp_path / "signed").write_bytes(b"bytes")
    (tmp_path / "signature").write_bytes(signer_of_file(keys[0]).sign(b"bytes"))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys[1], "-rawin", "-in", tmp_path / "signed"]
    assert subprocess.run([*command, "-sigfile", tmp_path / "signature"], check=False).returncode == 0


def test_wrong_usage(tmp_path: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-key", str(keys[0])]) == 2
    assert "File exists" in capsys.readouterr().err
    assert verify(tmp_path / "missing.json") == 2
    assert verify(certify(tmp_path, None), "--public-key", keys[0]) == 2
    assert verify(certify(tmp_path, None), "--parquet", tmp_path / "missing") == 1
    with pytest.raises(SigningError, match="not a PEM file"):
        signer_of_file(keys[1])
    with pytest.raises(NotACertificateError):
        Certificate.parsed(base64.b64encode(b"x").decode())
