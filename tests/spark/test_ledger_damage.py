"""Ledgers that are truncated, damaged or without rows are wrong usage, in one sentence that names the file."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from spark.jobs import reconcile
from spark.sources.ledgers import LedgerError, consumer_ledger, producer_ledger

IDS = [f"019a0000-0000-7000-8000-{number:012x}" for number in range(5000)]
TEXT = ("transaction_id,verdict\n" + "".join(f"{one},commit\n" for one in IDS)).encode()


def flipped(content: bytes, place: int) -> bytes:
    """Return the bytes with one bit changed."""
    changed = bytearray(content)
    changed[place] ^= 0x10
    return bytes(changed)


@pytest.fixture
def staging(tmp_path: Path) -> str:
    return str(tmp_path / "staging")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda whole: whole[: len(whole) // 2], "Unexpected end of input stream"),
        (lambda whole: flipped(whole, -8), "gzip stream CRC failure"),
        (lambda whole: TEXT, "not a gzip file"),
        pytest.param(lambda whole: whole[:-8], "Unexpected end of input stream", marks=pytest.mark.slow),
        pytest.param(lambda whole: whole[:-3], "Unexpected end of input stream", marks=pytest.mark.slow),
        pytest.param(lambda whole: flipped(whole, -4), "stored gzip size doesn't match", marks=pytest.mark.slow),
        pytest.param(lambda whole: whole + b"more than a header", "not a gzip file", marks=pytest.mark.slow),
        pytest.param(lambda whole: whole[:10], "Unexpected end of input stream", marks=pytest.mark.slow),
        pytest.param(lambda whole: b"", "has no column transaction_id", marks=pytest.mark.slow),
    ],
    ids=["half", "checksum", "no gzip", "without trailer", "cut trailer", "size", "more", "head alone", "empty"],
)
def test_a_damaged_gz_is_named(
    damage: Callable[[bytes], bytes], said: str, spark: SparkSession, tmp_path: Path, staging: str
) -> None:
    # The whole file beside it shows that the damaged one is named, and not the directory.
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "whole.csv.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "ledger" / "broken.csv.gz").write_bytes(damage(gzip.compress(TEXT)))
    with pytest.raises(LedgerError) as refused:
        producer_ledger(spark, str(tmp_path / "ledger"), staging)
    assert str(refused.value).startswith(f"{tmp_path}/ledger/broken.csv.gz ")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("checksums", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_damaged_parquet_is_named(checksums: bool, spark: SparkSession, tmp_path: Path, staging: str) -> None:
    rows = pa.table({"transaction_id": IDS, "verdict": ["commit"] * len(IDS)})
    pq.write_table(rows, tmp_path / "a.parquet", compression="gzip", write_page_checksum=checksums)
    whole = (tmp_path / "a.parquet").read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:-3], b"", flipped(whole, 2000)):
        (tmp_path / "a.parquet").write_bytes(broken)
        with pytest.raises(LedgerError, match=r"^\S+/a\.parquet cannot be read[^\n]*$"):
            producer_ledger(spark, str(tmp_path / "a.parquet"), staging)


def test_a_ledger_without_rows_must_be_declared(spark: SparkSession, tmp_path: Path, staging: str) -> None:
    producers, consumers = tmp_path / "orders.csv.gz", tmp_path / "points.csv"
    producers.write_bytes(gzip.compress(b"transaction_id,verdict\n"))
    consumers.write_text("message_id\n")
    for reader, place, name in ((producer_ledger, producers, "producer"), (consumer_ledger, consumers, "consumer")):
        with pytest.raises(LedgerError) as refused:
            reader(spark, str(place), staging)
        assert str(refused.value) == f"{place} has no rows; if that is right, add --{name}-ledger-complete"
        assert reader(spark, str(place), staging, complete=True).counts["read"] == 0


def test_a_run_with_a_truncated_ledger_ends_with_one_sentence(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "orders.csv.gz").write_bytes(gzip.compress(TEXT)[:-20])
    ledger = ["--producer-ledger", str(tmp_path / "orders.csv.gz"), "--staging", str(tmp_path / "staged")]
    assert reconcile.main(["--from-parquet", str(tmp_path), *ledger]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert [line.partition(":")[0] for line in said] == [f"{tmp_path}/orders.csv.gz cannot be read to its end"]
