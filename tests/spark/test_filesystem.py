"""Files as Spark has them, and as pyarrow has them for a session of Spark Connect: the same."""

import hashlib
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.engine import connect
from spark.engine.filesystem import Files, FilesHere, FilesOfSpark, files_for
from spark.engine.session import engine_of, is_local
from spark.errors import RunFailedError


@pytest.fixture(params=["of Spark", "here"])
def files(request: pytest.FixtureRequest, spark: SparkSession) -> Files:
    return FilesHere() if request.param == "here" else FilesOfSpark(spark)


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_files_are_written_listed_moved_and_removed(files: Files, scheme: str, tmp_path: Path) -> None:
    root = f"{scheme}{tmp_path}/a day ü"
    files.write_text(f"{root}/new/part 1.json", "ä")
    files.write_text(f"{root}/new/_SUCCESS", "")
    files.make(f"{root}/new/below")
    assert files.names(f"{root}/new") == ["_SUCCESS", "below", "part 1.json"]
    assert {place.removeprefix("file:") for place in files.children(f"{root}/new")} == {
        f"{tmp_path}/a day ü/new/{name}" for name in ("_SUCCESS", "below", "part 1.json")
    }
    [file] = files.children(f"{root}/new/part 1.json")
    assert files.children(file) == [file]
    assert files.children(f"{root}/missing") == []
    assert [files.is_directory(f"{root}/new{name}") for name in ("", "/below", "/_SUCCESS")] == [True, True, False]
    assert (files.size(file), files.read_text(file)) == (2, "ä")
    assert (files.length(file), files.length(f"{root}/new/missing"), files.length(f"{root}/none/missing")) == (
        2,
        None,
        None,
    )
    assert files.sha256(file) == hashlib.sha256("ä".encode()).hexdigest()
    assert files.qualified(f"{root}/") == f"file:{tmp_path}/a day ü"

    files.write_text(f"{root}/old/part 2.json", "{}")
    files.replace(f"{root}/old", f"{root}/new")
    assert (files.exists(f"{root}/new"), files.names(f"{root}/old")) == (False, ["_SUCCESS", "below", "part 1.json"])
    files.replace(f"{root}/one.json", f"{root}/old/part 1.json")
    assert files.names(root) == ["old", "one.json"]
    for name in ("old", "one.json", "missing"):
        files.remove(f"{root}/{name}")
    assert files.names(root) == []
    # No checksum files of Hadoop's are left.
    assert list(tmp_path.rglob("*")) == [tmp_path / "a day ü"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lets nobody remove this file, whoever runs the test.")
def test_what_cannot_be_removed_is_an_error(files: Files, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="version"):
        files.remove("file:/proc/version")
    files.write_text(f"{tmp_path}/new", "")
    with pytest.raises(OSError, match="version"):
        files.replace("file:/proc/version", f"{tmp_path}/new")
    assert files.exists("file:/proc/version")


def test_a_classic_session_has_the_files_of_spark(spark: SparkSession) -> None:
    assert isinstance(files_for(spark), FilesOfSpark)
    assert (is_local(spark), engine_of(spark, None)) == (True, "local[2]")


def test_a_filesystem_that_pyarrow_lacks_is_named() -> None:
    with pytest.raises(RunFailedError, match=r"With Spark Connect, swift://box/x cannot be reached from here"):
        FilesHere().exists("swift://box/x")


def test_the_server_is_that_of_the_option_or_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    assert [connect.server(master) for master in (None, "local[2]", "sc://one:1")] == [None, None, "sc://one:1"]
    monkeypatch.setenv("SPARK_REMOTE", "sc://two:2/;token=secret")
    assert connect.server(None) == connect.server("sc://two:2/;token=secret") == "sc://two:2/;token=secret"
    with pytest.raises(RunFailedError, match=r"SPARK_REMOTE is sc://two:2\. It must be") as refused:
        connect.server("local[2]")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("SPARK_REMOTE", "local[4]")
    with pytest.raises(RunFailedError, match=r"SPARK_REMOTE is local\[4\]"):
        connect.server(None)
