"""The archive and the proof's output in a bucket: a real S3 server, and Spark's jars for it, by their coordinate."""

import gzip
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from app.config import Settings
from app.database.connection import Connection
from app.retention import loop as retention_loop
from app.runtime.state import Runtime
from spark.jobs import archive
from spark.manifest import TABLES
from tests.spark.archives import DAY, NOW, row_of, secret, settled_day
from tests.spark.buckets import JARS, Bucket, bucket
from tests.spark.days import days_ago, fill_day, flip_ops, rows, start_proof
from tests.support.processes import ROOT

WITHIN_S = 280.0
SCHEMA = f"restored_{DAY:%Y%m%d}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Bucket]:
    with bucket(tmp_path / "store") as made:
        yield made


@pytest.fixture
def settings(dsn: str) -> Settings:
    archive_url = "s3a://archive/halfnote"
    return Settings(_env_file=None, database_url=dsn, pool_size=8, linger_s=0, archive=archive_url)  # type: ignore[call-arg]


def start(store: Bucket, dsn: str, place: Path, job: str, *options: object) -> "subprocess.Popen[str]":
    program = (sys.executable, "-m", f"spark.jobs.{job}")
    whereto = {"HALFNOTE_ARCHIVE": f"{store.url}/halfnote", "SPARK_LOCAL_DIRS": str(place)}
    return start_proof(dsn, place, *options, "--master", "local[2]", program=program, **store.environment, **whereto)


def run(store: Bucket, dsn: str, place: Path, job: str, *options: object) -> tuple[int, str]:
    """Run a job of Spark's to its end; its exit status and what it said."""
    started = start(store, dsn, place, job, *options)
    out, said = started.communicate(timeout=WITHIN_S)
    return started.returncode, out + said


def table(store: Bucket, key: str) -> list[dict[str, Any]]:
    """The rows of an object, as another reader of Parquet has them."""
    found: list[dict[str, Any]] = pq.read_table(io.BytesIO(store.read(key))).to_pylist()
    return found


def bodies(store: Bucket) -> list[bytes]:
    """Return every body in every Parquet file in the bucket."""
    files = [table(store, key) for key in store.objects() if key.endswith(".parquet")]
    return [row["body"] for found in files for row in found if row.get("body")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_day_lives_in_a_bucket_and_comes_back(
    group: str,
    store: Bucket,
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    dsn: str,
    tmp_path: Path,
) -> None:
    ids = await settled_day(client, runtime, db)
    ended, said = run(store, dsn, tmp_path, "archive")
    assert ended == 0, said
    day = row_of(dsn)
    assert day.archive is not None
    assert day.archive_manifest is not None
    place = day.archive.removeprefix(f"{store.url}/")
    assert place.startswith(f"halfnote/day={DAY}/")
    assert json.loads(store.read(f"{place}/manifest.json")) == day.archive_manifest
    # Nothing but what the manifest names, and no traces of how it was written.
    for name in TABLES:
        listed = sorted(f"{place}/{file['path']}" for file in day.archive_manifest["tables"][name]["files"])
        assert store.objects(f"{place}/{name}") == listed
        kept = await db.fetch(f"select * from {name}")
        stored = [{**row, "transaction_id": str(row["transaction_id"])} for row in kept]
        assert sorted((row for key in listed for row in table(store, key)), key=str) == sorted(stored, key=str)

    await retention_loop.step(runtime, NOW)
    assert row_of(dsn).state == "gone"
    before = bodies(store)
    gone = json.dumps({"text": secret(1)}, separators=(",", ":")).encode()
    assert before.count(gone) == 1
    ended, said = run(store, dsn, tmp_path, "redact", f"{ids[1]}-0", "--reason", "request 17", "--actor", "ada")
    assert ended == 0, said
    assert sorted(bodies(store)) == sorted(body for body in before if body != gone)

    # It reads the whole archive, and compares what it restored with the manifest.
    ended, said = run(store, dsn, tmp_path, "restore", DAY)
    assert ended == 0, said
    restored = await db.fetch(f"select body from {SCHEMA}.half")
    # An empty body is there as well.
    assert sorted(row["body"] for row in restored if row["body"]) == sorted(bodies(store))
    assert len(restored) == 10

    # The proof of the archive alone: the receipts' digests are made up, and it says so where it was told to.
    out = ("--from-parquet", day.archive, "--out", f"{store.url}/proof")
    ended, said = run(store, dsn, tmp_path, "reconcile", *out)
    assert ended == 3, said
    findings = [key for key in store.objects(f"proof/findings/day={DAY}") if key.endswith(".parquet")]
    assert {row["kind"] for key in findings for row in table(store, key)} == {"content_differs"}
    assert b"<html" in store.read("proof/report.html")

    damaged = next(key for key in store.objects(f"{place}/op") if key.endswith(".parquet"))
    content = bytearray(store.read(damaged))
    content[-20] ^= 1
    store.write(damaged, bytes(content))
    ended, said = run(store, dsn, tmp_path, "archive", "--verify")
    assert ended == 3
    assert "other bytes than were written" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_what_a_killed_archive_left_in_a_bucket_counts_for_nothing(
    group: str,
    store: Bucket,
    client: httpx.AsyncClient,
    runtime: Runtime,
    db: Connection,
    dsn: str,
    tmp_path: Path,
) -> None:
    await settled_day(client, runtime, db)
    with psycopg.connect(dsn) as other:
        # What it reads after the big tables: so it has written these, and waits.
        other.execute("lock table subscription in access exclusive mode")
        killed = start(store, dsn, tmp_path, "archive")
        deadline = time.monotonic() + WITHIN_S
        while not all(any(f"/{name}/part-" in key for key in store.objects("halfnote")) for name in TABLES):
            assert killed.poll() is None, killed.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=60)
    assert row_of(dsn).archive is None
    left = {key.split("/")[2] for key in store.objects(f"halfnote/day={DAY}")}
    assert len(left) == 1
    assert not [key for key in store.objects() if key.endswith("manifest.json")]

    ended, said = run(store, dsn, tmp_path, "archive")
    assert ended == 0, said
    day = row_of(dsn)
    assert day.archive is not None
    # What was left is removed, whole.
    assert {key.split("/")[2] for key in store.objects(f"halfnote/day={DAY}")} == {day.archive.rpartition("/")[2]}
    assert day.archive.rpartition("/")[2] not in left


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_findings_go_to_a_bucket_and_replace_what_was_said_before(store: Bucket, dsn: str, tmp_path: Path) -> None:
    day = days_ago(5)
    fill_day(dsn, day, 300)
    flipped = flip_ops(dsn, 3)
    for found in (flipped, flipped[1:]):
        ended, said = run(store, dsn, tmp_path, "reconcile", "--day", day, "--out", f"{store.url}/proof")
        assert ended == 3, said
        written = [key for key in store.objects(f"proof/findings/day={day}") if key.endswith(".parquet")]
        subjects = sorted(row["subject"] for key in written for row in table(store, key))
        assert subjects == [f"{one}-0" for one in sorted(found)]
        assert b"<html" in store.read("proof/report.html")
        # Nothing is left of what lay aside.
        assert [key for key in store.objects("proof") if ".run-" in key] == []
        with psycopg.connect(dsn) as db:
            db.execute("update op set verdict = 1 where transaction_id = %s", [flipped[0]])
    assert len(rows(dsn, "select from reconciliation_run")) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ledgers_in_a_bucket_are_read(store: Bucket, dsn: str, tmp_path: Path) -> None:
    day = days_ago(5)
    fill_day(dsn, day, 20)
    ids = [str(row["transaction_id"]) for row in rows(dsn, "select transaction_id from op order by 1")]
    producer = "".join(f"{one},{'rollback' if one == ids[3] else 'commit'}\n" for one in ids)
    store.write("ledgers/shop/part.csv.gz", gzip.compress(f"transaction_id,verdict\n{producer}".encode()))
    consumed = io.BytesIO()
    pq.write_table(pa.table({"message_id": [f"{one}-0" for one in [*ids[1:], ids[5]]]}), consumed)
    store.write("ledgers/points.parquet", consumed.getvalue())
    # Files of other names are no part of a ledger.
    store.write("ledgers/shop/_SUCCESS", b"")
    ledgers = (
        "--producer-ledger",
        f"{store.url}/ledgers/shop/",
        "--consumer-ledger",
        f"{store.url}/ledgers/points.parquet",
    )
    ended, said = run(store, dsn, tmp_path, "reconcile", "--day", day, *ledgers)
    assert ended == 3, said
    found = {(row["kind"], row["subject"]) for row in rows(dsn, "select kind, subject from finding")}
    assert found == {
        ("ledger_disagrees", ids[3]),
        ("never_consumed", f"{ids[0]}-0"),
        ("consumed_twice", f"{ids[5]}-0"),
    }

    store.write("ledgers/shop/part.csv.gz", gzip.compress(producer.encode())[:-9])
    ended, said = run(store, dsn, tmp_path, "reconcile", "--day", day, *ledgers)
    assert ended == 2, said
    assert f"{store.url}/ledgers/shop/part.csv.gz" in said
    ended, said = run(store, dsn, tmp_path, "reconcile", "--producer-ledger", f"{store.url}/ledgers/nothing/")
    assert (ended, "does not exist" in said) == (2, True), said


def test_without_the_jars_it_says_which_are_missing(
    spark: SparkSession, dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert archive.main(["--database-url", dsn, "--archive", "s3a://bucket/halfnote"]) == 1
    assert JARS in capsys.readouterr().err
    assert archive.main(["--database-url", dsn, "--archive", "nosuch://bucket/halfnote"]) == 1
    assert "Spark lacks the jars that nosuch://bucket/halfnote needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    "page", ["docs/archive.md", "docs/kubernetes.md", "scripts/bucket-deps", "Dockerfile", "helm/halfnote/values.yaml"]
)
def test_what_names_the_jars_names_the_version_of_spark_s_own_hadoop(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.count("hadoop-aws:") == text.count(JARS) > 0
