"""The session, its jar, and the schemas."""

import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.errors.utils import is_debugging_enabled
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark import schemas
from spark.engine.jdbc_driver import COORDINATE, NoJarError, configured_settings, jar_settings
from spark.engine.session import configured, session
from spark.frames import Frames
from tests.spark.conftest import SMALL, frame, write_frame


def test_a_jar_that_is_named_is_used_and_must_be_there(tmp_path: Path) -> None:
    jar = tmp_path / "driver.jar"
    with pytest.raises(NoJarError, match=COORDINATE):
        jar_settings({"HALFNOTE_JDBC_JAR": str(jar)})
    jar.touch()
    assert jar_settings({"HALFNOTE_JDBC_JAR": str(jar)}) == {"spark.jars": str(jar)}


def test_without_any_jar_it_comes_from_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert jar_settings({}) == {"spark.jars.packages": COORDINATE}


def test_reading_with_copy_alone_waits_for_no_maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HALFNOTE_SPARK_CONF", raising=False)
    monkeypatch.delenv("HALFNOTE_JDBC_JAR", raising=False)
    assert configured(None, jdbc=False) == configured("local[2]", jdbc=False) == {}
    fetched = {"spark.jars.packages": COORDINATE}
    assert configured(None, jdbc=True) == configured("spark://master:7077", jdbc=False) == fetched
    monkeypatch.setenv("HALFNOTE_SPARK_CONF", "spark.master=spark://master:7077")
    assert configured(None, jdbc=False) == fetched | {"spark.master": "spark://master:7077"}
    # A jar that is there costs nothing.
    jar = tmp_path / "driver.jar"
    jar.touch()
    monkeypatch.setenv("HALFNOTE_JDBC_JAR", str(jar))
    assert configured("local[2]", jdbc=False)["spark.jars"] == str(jar)


def test_settings_that_are_told_come_with_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    configuration = "spark.jars.packages=a:b:1,c:d:2\n\n spark.hadoop.x = y=z \n"
    assert configured_settings({"HALFNOTE_SPARK_CONF": configuration}) == {
        "spark.jars.packages": f"{COORDINATE},a:b:1,c:d:2",
        "spark.hadoop.x": "y=z",
    }
    jar = tmp_path / "driver.jar"
    jar.touch()
    assert configured_settings({"HALFNOTE_SPARK_CONF": configuration, "HALFNOTE_JDBC_JAR": str(jar)}) == {
        "spark.jars": str(jar),
        "spark.jars.packages": "a:b:1,c:d:2",
        "spark.hadoop.x": "y=z",
    }
    for wrong in ("spark.hadoop.x", "hadoop.x=y"):
        with pytest.raises(NoJarError, match=r"HALFNOTE_SPARK_CONF has the line .*x"):
            configured_settings({"HALFNOTE_SPARK_CONF": wrong})


def test_every_frame_has_its_schema() -> None:
    optional = {
        "producer_ledger",
        "consumer_ledger",
        "archive",
        "archive_manifest",
        "archive_problems",
        "found_manifest",
    }
    optional |= {"producer_ledger_complete", "ledger_groups", "receipts_since", "same_offset", "routes", "certified"}
    optional |= {"absent", "across", "files", "nothing"}
    optional |= set(schemas.FOUND)
    assert set(Frames.__dataclass_fields__) - optional - {"day", "seen_at", "rules", "rows"} == set(schemas.FRAMES)


def test_rows_come_back_as_they_were_written(spark: SparkSession, tmp_path: Path) -> None:
    row = {
        "transaction_id": "019a9f6c-0000-7000-8000-000000000001",
        "position": 0,
        "offset": 2**40,
        "topic": "order",
        "committed_at": datetime(2026, 10, 25, 1, 30, 0, 123456, tzinfo=UTC),
    }
    write_frame(spark, schemas.OUTBOX, [row], tmp_path / "outbox")
    read = spark.read.schema(schemas.OUTBOX).parquet(str(tmp_path / "outbox"))
    assert read.collect() == frame(spark, schemas.OUTBOX, [row]).collect()
    assert read.selectExpr("unix_micros(committed_at) as at").collect()[0]["at"] == 1_792_891_800_123_456


def test_rows_come_to_python_by_a_socket_file_that_no_stranger_meets(spark: SparkSession) -> None:
    # Not by a port: the first client to connect would take the reader's place.
    where, secret = spark.range(3)._jdf.collectToPython()[:2]
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(where)
        assert wire.recv(1)
    assert secret is None


def test_expressions_do_not_record_the_line_of_python_that_made_them(spark: SparkSession) -> None:
    # A name that PySpark no longer reads would cost half of a small run's CPU time, and nothing else would show it.
    assert not is_debugging_enabled()
    with pytest.raises(AnalysisException) as wrong:
        spark.range(1).select(F.col("id") / F.col("missing"))
    assert wrong.value.getQueryContext() == []


def test_a_session_that_is_there_keeps_its_settings(spark: SparkSession) -> None:
    kept = {name: spark.conf.get(name) for name in SMALL}
    assert session(None, **{"spark.sql.maxMetadataStringLength": "1030"}) is spark
    assert spark.conf.get("spark.sql.maxMetadataStringLength") == "1030"
    assert {name: spark.conf.get(name) for name in SMALL} == kept
    assert kept["spark.sql.adaptive.enabled"] == "false"
