"""Damage of an archive, file by file: `--verify` finds it, and a proof of the archive alone ends with a sentence."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from spark.archive.layout import damage, manifest_of
from spark.engine.filesystem import files_for
from spark.jobs import archive, reconcile
from tests.spark.archives import MadeDay, path_of, row_of
from tests.spark.days import days_ago, fill_day, prove

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
    files, described = files_for(spark), manifest_of(files_for(spark), str(place))
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


@pytest.mark.slow
def test_damage_of_each_kind_of_file_ends_both_with_its_name(
    dsn: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [path for path in sorted(place.rglob("*")) if path.is_file() and path.name[0] not in "._"]
    kinds = {path.relative_to(place).parts[0]: path for path in shown}
    tables = {"half", "op", "outbox", "receipt", "attempt"}
    beside = {"subscription", "subscription_version", "checkpoint", "producer_group", "frames.json", "manifest.json"}
    assert set(kinds) >= tables | beside
    programs = (
        (3, archive.main, ["--database-url", dsn, "--verify"]),
        (2, reconcile.main, ["--from-parquet", str(place), "--out", str(tmp_path / "out")]),
    )
    damages = (
        flipped,
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: None,
    )
    for number, (kind, path) in enumerate(kinds.items()):
        content = path.read_bytes()
        # Each kind has one sort of damage, and each sort of damage several kinds.
        broken = damages[number % len(damages)](content)
        path.unlink() if broken is None else path.write_bytes(broken)
        for status, program, options in programs:
            ended = program(options)
            said = [line for line in capsys.readouterr().err.splitlines() if '"stage"' not in line]
            assert ended == status, (kind, said)
            assert len(said) == 1 or (kind in tables and status == 3), (kind, said)
            assert str(path.relative_to(place)) in said[0], (kind, said)
        path.write_bytes(content)
    assert archive.main(["--database-url", dsn, "--verify"]) == 0
    assert not (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_a_damaged_file_of_the_owner_is_named(dsn: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = place.parent.parent / "halfnote.json"
    whole = owner.read_text()
    for broken, said in (
        (whole[:-2], "halfnote.json is damaged"),
        ("[]", "halfnote.json is damaged"),
        ('{"database": "another"}', "names another database, another"),
        (None, "halfnote.json is missing"),
    ):
        owner.unlink() if broken is None else owner.write_text(broken)
        assert archive.main(["--database-url", dsn, "--verify"]) == 3
        assert said in capsys.readouterr().err
    owner.write_text(whole[:-2])
    assert archive.main(["--database-url", dsn, "--archive", str(owner.parent)]) == 1
    told = capsys.readouterr().err
    assert "halfnote.json is damaged" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_damaged_frames_of_a_run_end_with_a_sentence(
    dsn: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = days_ago(1)
    fill_day(dsn, day, 30)
    prove(dsn, "--day", day, "--staging", tmp_path / "staging", "--keep-staging")
    [frames] = [place.parent for place in tmp_path.glob(f"staging/**/{day}/half")]
    before = reconcile.main(["--from-parquet", str(frames)])
    assert before in (0, 3)
    capsys.readouterr()
    described = (frames / "frames.json").read_bytes()
    for listed in (True, False):
        for name, broken in (("receipt", None), ("op", flipped), ("subscription", lambda content: content[:9])):
            if not listed and broken is flipped:
                continue  # Only a list of the files shows a value that is another.
            for path in (frames / name).glob("*.parquet"):
                content = path.read_bytes()
                path.unlink() if broken is None else path.write_bytes(broken(content))
                assert reconcile.main(["--from-parquet", str(frames)]) == 2, name
                said = [line for line in capsys.readouterr().err.splitlines() if '"stage"' not in line]
                assert len(said) == 1, said
                assert "is damaged, so nothing was proved" in said[0]
                assert not listed or f"{name}/{path.name} " in said[0]
                path.write_bytes(content)
        (frames / "frames.json").write_text("{")
        assert reconcile.main(["--from-parquet", str(frames)]) == 2
        assert ("frames.json has 1 bytes" if listed else "frames.json cannot be read") in capsys.readouterr().err
        (frames / "frames.json").write_bytes(described)
        if listed:
            (frames / "files.json").write_text("[{}]")
            assert reconcile.main(["--from-parquet", str(frames)]) == 2
            assert "files.json cannot be read" in capsys.readouterr().err
            # Frames of an earlier version have no list.
            (frames / "files.json").unlink()
    assert reconcile.main(["--from-parquet", str(frames)]) == before


def test_verify_and_a_proof_of_the_archive_alone_say_what_is_damaged(
    dsn: str, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        return "\n".join(line for line in capsys.readouterr().err.splitlines() if '"stage"' not in line)

    def both() -> tuple[int, int]:
        verified = archive.main(["--database-url", dsn, "--verify"])
        out = ["--out", str(tmp_path / "out"), "--staging", str(tmp_path / "staged")]
        return verified, reconcile.main(["--from-parquet", str(place), *out])

    contents = {
        path: path.read_bytes() for path in (next((place / "subscription").glob("*.parquet")), place / "frames.json")
    }
    for path, content in contents.items():
        path.write_bytes(flipped(content))
    assert both() == (3, 2)
    told = said()
    for path, content in contents.items():
        assert told.count(f"{path.relative_to(place)} has other bytes than were written (SHA-256)") == 2
        path.write_bytes(content)
    assert "is damaged, so nothing was proved" in told
    manifest = place / "manifest.json"
    whole = manifest.read_text()
    for broken in (None, whole[:-9], whole.replace('"rows": 10', '"rows": 11', 1), "{}"):
        manifest.unlink() if broken is None else manifest.write_text(broken)
        assert both() == (3, 2)
        assert "manifest.json" in said()
    assert not (tmp_path / "out" / "report.html").exists()
