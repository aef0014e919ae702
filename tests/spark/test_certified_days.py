"""Certificates that runs write: signed, in a chain, verified without the database; and days that differ from theirs."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from spark.audit_retention import AUDIT_KEEP_S
from spark.certificate.document import Certificate
from spark.certificate.signing import new_key
from spark.jobs import archive
from spark.jobs.certificate import main as certificate
from tests.spark.days import days_ago, fill_day, prove, rows
from tests.spark.proved_twice import BEFORE, DAY, INVENTED, ProvedTwice, change

pytestmark = pytest.mark.usefixtures("spark")
OLD = days_ago(5)
# Each statement is a fault that no other rule needs to find.
FAULTS = {
    "op": "update op set decided_at = decided_at + interval '1 us' where transaction_id = %s",
    "op actor": "update op set actor = 'nobody' where transaction_id = %s",
    "op reason": "update op set reason = 'changed by hand' where transaction_id = %s",
    "half": "update half set headers = '{}' where transaction_id = %s",
    "outbox": "update outbox set tag = 'another' where transaction_id = %s",
    "receipt": "delete from receipt where transaction_id = %s",
}
TABLES = {fault.split()[0] for fault in FAULTS}


@pytest.fixture
def proved(dsn: str, tmp_path: Path) -> Path:
    """A certified day, and the directory of the run."""
    fill_day(dsn, OLD, 40)
    rows(dsn, "insert into audit (at, what, detail) values (now(), 'topic.declare', '{}') returning 1")
    (tmp_path / "key.pub").write_text(new_key(tmp_path / "key.pem"))
    kept = ("--staging", tmp_path / "staging", "--keep-staging")
    assert prove(dsn, "--out", tmp_path / "out", "--certificate-key", tmp_path / "key.pem", *kept) == 0
    return tmp_path


def stored(dsn: str) -> list[dict[str, Any]]:
    return rows(dsn, "select * from day_certificate order by sequence")


def subjects(dsn: str) -> set[str]:
    statement = "select subject from finding where kind = 'certificate_differs' and resolved_at is null"
    return {row["subject"] for row in rows(dsn, statement)}


def test_a_final_day_is_certified_in_the_chain(proved_twice: ProvedTwice) -> None:
    before, made = proved_twice.first.certificates
    assert [(one["day"], one["sequence"]) for one in (before, made)] == [(BEFORE, 1), (DAY, 2)]
    said = Certificate.parsed(made["document"])
    assert {name: table["rows"] for name, table in said.body["tables"].items()} == dict.fromkeys(TABLES, 40)
    assert said.body["previous"] == {
        "day": str(BEFORE),
        "digest": Certificate.parsed(before["document"]).digest,
    }
    # It names the last row of the audit; the first is that of the day's subscription.
    [chain] = rows(proved_twice.dsn, "select place, encode(digest, 'hex') as digest from audit_chain")
    assert said.body["audit"] == {**chain, "kept_s": AUDIT_KEEP_S, "verdicts_since": "-infinity"}
    assert chain["place"] == 2


def test_a_written_certificate_is_verified(proved_twice: ProvedTwice, capsys: pytest.CaptureFixture[str]) -> None:
    place, out = proved_twice.place, proved_twice.place / "out"
    document = out / f"certificates/{DAY}.json"
    assert document.read_text() == proved_twice.first.certificates[-1]["document"]
    [frames] = [half.parent for half in place.glob(f"staging/**/{DAY}/half")]
    given = ["--public-key", str(place / "key.pub"), "--previous", str(out / f"certificates/{BEFORE}.json")]
    both = ["--parquet", str(frames), "--parquet", str(out)]
    assert certificate(["verify", str(document), *given, *both]) == 0, capsys.readouterr().out


def test_a_day_is_certified_once_and_later_receipts_are_legal(proved_twice: ProvedTwice) -> None:
    # Redeliveries and replays add receipts.
    assert rows(proved_twice.dsn, "select count(*) as receipts from receipt") == [{"receipts": 41}]
    assert (proved_twice.again.status, subjects(proved_twice.dsn)) == (0, set())
    assert proved_twice.again.certificates == proved_twice.first.certificates


@pytest.mark.slow  # Each is two whole runs of the proof.
@pytest.mark.parametrize("fault", [*FAULTS, "invented"])
def test_a_day_that_was_changed_later_differs_from_its_certificate(dsn: str, proved: Path, fault: str) -> None:
    made = stored(dsn)
    statement = FAULTS.get(fault, INVENTED.format(at="settled_at", replay=9))
    changed = change(dsn, statement)
    assert prove(dsn, "--day", OLD) == 3
    assert subjects(dsn) == {f"{'receipt' if fault == 'invented' else fault.split()[0]} {changed[:7]}"}
    assert stored(dsn) == made


@pytest.mark.slow
def test_a_day_that_lost_all_rows_or_whose_certificate_was_changed(dsn: str, proved: Path) -> None:
    with psycopg.connect(dsn) as db:
        for table in (*TABLES, "attempt"):
            db.execute(f"truncate {table}_{OLD:%Y%m%d}")
        whole = json.loads(stored(dsn)[-1]["document"])
        whole["certificate"]["rules"] = "00"
        text = json.dumps(whole, sort_keys=True, separators=(",", ":")) + "\n"
        db.execute("update day_certificate set document = %s where day = %s", [text, OLD])
    assert prove(dsn, "--day", OLD) == 3
    found = subjects(dsn)
    assert "certificate" in found
    assert {subject.split()[0] for subject in found} == {*TABLES, "certificate"}


def test_a_published_certificate_is_not_replaced(dsn: str, proved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who deletes the stored certificate gets a new one, and is not rid of the old one."""
    [before] = [one["document"] for one in stored(dsn) if one["day"] == OLD]
    published = proved / f"out/certificates/{OLD}.json"
    given = ("--day", OLD, "--out", proved / "out", "--certificate-key", proved / "key.pem")
    rows(dsn, "delete from day_certificate returning 1")
    capsys.readouterr()
    assert prove(dsn, *given) == 3
    [after] = [one["document"] for one in stored(dsn) if one["day"] == OLD]
    beside = proved / f"out/certificates/{OLD}.{sha256(after.encode()).hexdigest()[:12]}.json"
    assert (published.read_text(), beside.read_text()) == (before, after)
    assert before != after
    said = capsys.readouterr()
    assert f"contradicted certificates in --out: {OLD}.json" in said.out
    assert '"note": "certificate_contradicted"' in said.err
    # There are no findings, and a run that writes no certificate says nothing of it.
    assert prove(dsn, *given) == 0


@pytest.mark.slow  # A whole run of the proof, and one of the archive.
def test_an_archive_is_compared_with_the_certificate(
    dsn: str, proved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, copy = proved / "archive", proved / "copy"
    assert archive.main(["--database-url", dsn, "--archive", str(root), "--day", str(OLD)]) == 0
    given = ["verify", str(proved / f"out/certificates/{OLD}.json"), "--public-key", str(proved / "key.pub")]
    assert certificate([*given, "--parquet", str(root)]) == 0, capsys.readouterr().out
    assert "is intact; signed by the given key" in capsys.readouterr().out

    shutil.copytree(root, copy)
    [file] = copy.glob(f"day={OLD}/*/op/*.parquet")
    ops = pq.read_table(file)
    changed = ops["transaction_id"][20].as_py()
    verdicts = pc.if_else(pc.equal(ops["transaction_id"], changed), pa.scalar(2, ops["verdict"].type), ops["verdict"])
    pq.write_table(ops.set_column(ops.column_names.index("verdict"), "verdict", verdicts), file)
    capsys.readouterr()
    assert certificate([*given, "--parquet", str(copy)]) == 3
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"op: rows with ids {changed[:7]}… (")
    assert last.endswith(f"of {OLD} differs in 1 places.")


@pytest.mark.slow  # A whole run of the proof, and one of the archive.
def test_content_that_only_digests_cover_is_compared(
    dsn: str, proved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bodies, the key and the context: the certificate has none of them."""
    root = proved / "archive"
    assert archive.main(["--database-url", dsn, "--archive", str(root), "--day", str(OLD)]) == 0
    given = ["verify", str(proved / f"out/certificates/{OLD}.json"), "--parquet", str(root)]
    assert certificate(given) == 0, capsys.readouterr().out
    [file] = root.glob(f"day={OLD}/*/half/*.parquet")
    content, manifest = file.read_bytes(), file.parent.parent / "manifest.json"
    half = pq.read_table(file)
    one = half["transaction_id"][20].as_py()
    this = pc.equal(half["transaction_id"], one)
    for column, value, said in (
        ("body", b"another", f"half: the body of {one}-0 is not of its digest"),
        ("body", None, f"half: the body of {one}-0 is missing, and no redaction is on record"),
        ("key", "another", f"half: the messages of {one} are not those of its digest"),
        ("context", "{}", f"half: the messages of {one} are not those of its digest"),
        ("content_type", "a/b", f"half: the messages of {one} are not those of its digest"),
    ):
        other = pc.if_else(this, pa.scalar(value, half[column].type), half[column])
        pq.write_table(half.set_column(half.column_names.index(column), column, other), file)
        capsys.readouterr()
        assert certificate(given) == 3
        first, last = capsys.readouterr().out.splitlines()
        assert (first, last.endswith("differs in 1 places.")) == (said, True)
    pq.write_table(half.drop_columns(["body"]), file)
    assert certificate(given) == 3
    # A column that is missing hides no change: not of this file, and not of the others.
    other = pc.if_else(this, pa.scalar("another", half["key"].type), half["key"])
    changed = half.set_column(half.column_names.index("key"), "key", other)
    pq.write_table(changed.drop_columns(["context"]), file)
    capsys.readouterr()
    assert certificate(given) == 3
    assert f"half: {file.name} lacks columns of an archive: context" in capsys.readouterr().out.splitlines()
    file.write_bytes(content)
    # A redacted body, and an archive without bodies, are no difference.
    described = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**described, "bodies": False}))
    assert certificate(given) == 0
    file.write_bytes(content)
    manifest.write_text(json.dumps({**described, "redacted": [{"message_id": f"{one}-0"}]}))
    nulls = pc.if_else(this, pa.scalar(None, half["body"].type), half["body"])
    pq.write_table(half.set_column(half.column_names.index("body"), "body", nulls), file)
    assert certificate(given) == 0, capsys.readouterr().out


def test_a_key_that_cannot_sign(dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Without rows, which need no rules: the certificates are the same otherwise.
    fill_day(dsn, OLD, 0)
    (tmp_path / "key.pub").write_text(new_key(tmp_path / "key.pem"))
    assert prove(dsn, "--certificate-key", tmp_path / "missing.pem") == 2
    given = ("--certificate-command", "false", "--certificate-public-key", tmp_path / "key.pub")
    assert prove(dsn, "--day", OLD, *given) == 1
    assert "cannot be signed: false ended with 1" in capsys.readouterr().err
    assert stored(dsn) == []
    assert rows(dsn, "select * from reconciliation_day") == []

    assert prove(dsn) == 0
    assert all(Certificate.parsed(row["document"]).signature is None for row in stored(dsn))
