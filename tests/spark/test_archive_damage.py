"""Damage of an archive, file by file: `--verify` finds it, and a proof of the archive alone ends with a sentence."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.archive.files import ArchiveFiles
from spark.archive.layout import damage, manifest_of
from spark.jobs import archive, reconcile
from tests.spark.archives import MadeDay, path_of, row_of

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def dsn(archived_day_made: MadeDay, tmp_path: Path) -> Iterator[str]:
    with archived_day_made.copied(tmp_path / "archive") as url:
        yield url


@pytest.fixture
def place(dsn: str) -> Path:
    return path_of(row_of(dsn).archive)


def flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


@pytest.mark.slow
def test_damage_of_each_file_is_named(place: Path, spark: SparkSession) -> None:
    files, described = ArchiveFiles(spark), manifest_of(ArchiveFiles(spark), str(place))
    assert damage(files, str(place), described) == {}
    # Spark's own _SUCCESS is empty and no reader sees it.
    shown = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name[0] not in "._"]
    paths = [path for path in shown if path.name != "manifest.json"]
    assert {path.relative_to(place).parts[0] for path in paths} >= {"half", "subscription", "frames.json"}
    for path in paths:
        content = path.read_bytes()
        name = str(path.relative_to(place))
        for broken in (flipped(content), content[:-1], b"", None):
            path.unlink() if broken is None else path.write_bytes(broken)
            [[word]] = damage(files, str(place), described).values()
            assert word.startswith(f"{name} "), (name, word)
        path.write_bytes(content)
    for added in ("half/more.parquet", "subscription/more.parquet", "dead_letter/more.parquet", "more.txt"):
        (place / added).parent.mkdir(exist_ok=True)
        (place / added).write_bytes(b"more")
        assert damage(files, str(place), described) == {"beside": [f"{added} is not in the manifest"]}
        (place / added).unlink()


def test_verify_and_a_proof_of_the_archive_alone_say_what_is_damaged(
    dsn: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        return "\n".join(line for line in capsys.readouterr().err.splitlines() if '"stage"' not in line)

    def both() -> tuple[int, int]:
        verified = archive.main(["--database-url", dsn, "--verify"])
        out = ["--out", str(tmp_path / "out"), "--staging", str(tmp_path / "staged")]
        return verified, reconcile.main(["--from-parquet", str(place), *out])

    for path in (next((place / "subscription").glob("*.parquet")), place / "frames.json"):
        content = path.read_bytes()
        path.write_bytes(flipped(content))
        assert both() == (3, 1)
        told = said()
        assert told.count(f"{path.relative_to(place)} has other bytes than were written (SHA-256)") == 2
        assert "is damaged, so nothing was proved" in told
        path.write_bytes(content)
    manifest = place / "manifest.json"
    whole = manifest.read_text()
    for broken in (None, whole[:-9], whole.replace('"rows": 10', '"rows": 11', 1), "{}"):
        manifest.unlink() if broken is None else manifest.write_text(broken)
        assert both() == (3, 1)
        assert "manifest.json" in said()
    assert not (tmp_path / "out" / "report.html").exists()
