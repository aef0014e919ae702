"""What may be the only copy of a day is never removed: moves, restored databases, changed tables, a lost mount."""

import json
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from app.ids import uuid7
from spark.jobs import archive, reconcile, redact
from spark.manifest import TABLES, partition
from tests.spark.archives import DAY, THEN, MadeDay, path_of, row_of
from tests.spark.days import rows

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def dsn(archived_day_made: MadeDay, root: Path) -> Iterator[str]:
    """A database with a day that is archived below `root`, and whose tables are still there."""
    with archived_day_made.copied(root) as url:
        yield url


@pytest.fixture
def first(dsn: str) -> Path:
    """The directory of the archived day's attempt."""
    return path_of(row_of(dsn).archive)


def run(dsn: str, root: Path, *options: str) -> int:
    return archive.main(["--database-url", dsn, "--archive", str(root), *options])


def change(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn) as db:
        for statement in statements:
            db.execute(statement)


def attempts(root: Path) -> set[Path]:
    return set((root / f"day={DAY}").iterdir())


def drop_tables(dsn: str) -> None:
    """Remove the day from Postgres, as upkeep does."""
    tables = ", ".join(partition(table, DAY) for table in TABLES)
    change(dsn, f"drop table {tables}", f"update day set state = 'gone' where day = '{DAY}'")


ADD = (
    "insert into attempt (transaction_id, kind, at, outcome) "
    f"select transaction_id, 'swept', '{THEN}', '' from op limit 1"
)
WRITE_OP = f"insert into op values ('{uuid7(THEN)}', 2, 0, null, null, '{THEN}')"
FORGET = f"update day set archive = null, archive_manifest = null, archived_at = null where day = '{DAY}'"


@pytest.mark.parametrize("state", [pytest.param("open", marks=pytest.mark.slow), "gone"])
def test_a_moved_archive_is_refused_until_its_new_address_is_recorded(
    dsn: str, root: Path, first: Path, tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(dsn, f"update day set state = '{state}' where day = '{DAY}'")
    new = tmp_path / "big" / "archive"
    shutil.move(root, new)
    moved = new / first.relative_to(root)
    before = row_of(dsn)
    assert run(dsn, new) == 1
    said = capsys.readouterr().err
    assert f"{new} has the archives of 1 days that the database has at other addresses" in said
    assert "run this once with --moved" in said
    # Not before everything is there.
    [file] = (moved / "op").glob("*.parquet")
    file.rename(tmp_path / "op.parquet")
    assert run(dsn, new, "--moved") == 1
    assert "Finish the copy" in capsys.readouterr().err
    (tmp_path / "op.parquet").rename(file)
    assert (moved.is_dir(), row_of(dsn)) == (True, before)

    assert run(dsn, new, "--moved") == 0
    assert path_of(row_of(dsn).archive) == moved
    assert attempts(new) == {moved}
    [act] = rows(dsn, "select target, detail from audit where what = 'archive.move'")
    assert act == {"target": str(DAY), "detail": {"archive": row_of(dsn).archive, "former": before.archive}}
    assert (run(dsn, new), run(dsn, new, "--verify")) == (0, 0)
    assert attempts(new) == {moved}


@pytest.mark.slow
def test_an_earlier_location_is_cleared_if_a_person_says_so(
    dsn: str, root: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HALFNOTE_ARCHIVE was changed to an empty directory."""
    second, third = tmp_path / "second", tmp_path / "third"
    change(dsn, ADD)
    assert run(dsn, second) == 0
    # A copy of the database would do the same.
    assert (second in path_of(row_of(dsn).archive).parents, attempts(root)) == (True, {first})
    assert run(dsn, second, "--earlier-locations") == 0
    assert attempts(root) == set()
    # The third location gets nothing, and the day leaves the second one for its age.
    drop_tables(dsn)
    assert run(dsn, third, "--earlier-locations", "--keep-s", str(86_400 * 30)) == 0
    capsys.readouterr()
    assert run(dsn, third, "--keep-s", "86400") == 0
    assert f"1 days are past their retention at file:{second}" in capsys.readouterr().err
    owner = second / "halfnote.json"
    hidden = owner.rename(second / "hidden")
    assert run(dsn, third, "--earlier-locations", "--keep-s", "86400") == 0
    assert f"The archive at file:{second} cannot be looked at: halfnote.json is missing" in capsys.readouterr().err
    assert (second / f"day={DAY}").exists()
    hidden.rename(owner)
    assert run(dsn, third, "--earlier-locations", "--keep-s", "86400") == 0
    assert (row_of(dsn).archive, (second / f"day={DAY}").exists()) == (None, False)


def test_a_copy_that_a_move_left_refuses_a_redaction(
    archived_day_made: MadeDay, dsn: str, root: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "new"
    shutil.copytree(root, new)
    assert run(dsn, new, "--moved") == 0
    drop_tables(dsn)
    capsys.readouterr()
    asked = ["--database-url", dsn, f"{archived_day_made.ids[0]}-0", "--reason", "erasure request 17"]
    assert redact.main(asked) == 1
    said = capsys.readouterr().err
    assert f"{first} is a copy of the day's archive, and may have the body. Remove it" in said
    # It cannot be looked at.
    (root / "halfnote.json").write_text("{}")
    assert redact.main(asked) == 0
    printed = capsys.readouterr()
    assert f"file:{root} cannot be looked at, and may have the body" in printed.err
    assert "is redacted" in printed.out


@pytest.mark.slow
def test_two_addresses_of_one_archive_are_no_copy(
    archived_day_made: MadeDay, dsn: str, root: Path, first: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    shutil.move(root, new)
    root.symlink_to(new)
    assert run(dsn, new, "--moved") == 0
    drop_tables(dsn)
    asked = ["--database-url", dsn, f"{archived_day_made.ids[0]}-0", "--reason", "erasure request 17"]
    assert redact.main(asked) == 0
    assert sorted(one.name for one in new.iterdir()) == [f"day={DAY}", "halfnote.json"]


def test_what_a_replay_adds_to_an_archived_day_is_no_finding_and_is_archived(dsn: str, root: Path, first: Path) -> None:
    change(
        dsn,
        "update reconciliation_day set state = 'provisional'",
        "insert into receipt select (jsonb_populate_record(r, '{\"replay\": 7}')).* from receipt r",
        "insert into attempt select (jsonb_populate_record(a, jsonb_build_object('attempt_id', attempt_id + 7))).* "
        "from attempt a",
    )
    assert reconcile.main(["--database-url", dsn, "--day", str(DAY)]) in (0, 3)
    found = rows(dsn, "select subject from finding where kind = 'archive_differs' and resolved_at is null")
    assert found == []
    assert run(dsn, root) == 0
    (second,) = attempts(root)
    assert second != first
    # Of other tables a row that is added is one.
    change(dsn, WRITE_OP)
    reconcile.main(["--database-url", dsn, "--day", str(DAY)])
    found = rows(dsn, "select subject from finding where kind = 'archive_differs' and resolved_at is null")
    assert [row["subject"] for row in found] == ["op"]


def test_another_form_of_the_same_address_is_no_move(dsn: str, root: Path, first: Path) -> None:
    change(dsn, f"update day set state = 'gone', archive = replace(archive, 'file:/', 'file:///') where day = '{DAY}'")
    assert str(row_of(dsn).archive).startswith("file:///")
    assert run(dsn, root) == 0
    assert attempts(root) == {first}


def test_what_a_restored_database_does_not_know_stays(
    dsn: str, root: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The restored tables are older: a receipt that the archive has is not there."""
    change(
        dsn,
        FORGET,
        "delete from receipt where (transaction_id, position) in (select transaction_id, position "
        "from receipt limit 1)",
    )
    for _ in range(2):
        assert run(dsn, root) == 0
        second = path_of(row_of(dsn).archive)
        assert attempts(root) == {first, second}
        assert f"{first} is complete, no row names it" in capsys.readouterr().err
    assert (first / "manifest.json").exists()


def test_an_attempt_whose_rows_are_all_in_the_new_archive_is_removed(dsn: str, root: Path, first: Path) -> None:
    change(dsn, FORGET, ADD)
    assert run(dsn, root) == 0
    second = path_of(row_of(dsn).archive)
    assert attempts(root) == {second} != {first}
    assert json.loads((second / "manifest.json").read_text())["replaces"] == [first.name]


def test_a_day_whose_archive_is_not_there_is_archived_again(dsn: str, root: Path, first: Path) -> None:
    """The restored row names an attempt that was replaced later."""
    later = first.parent / str(uuid4())
    first.rename(later)
    assert run(dsn, root) == 0
    again = path_of(row_of(dsn).archive)
    assert attempts(root) == {again}
    assert again not in (first, later)
    assert run(dsn, root, "--verify") == 0


@pytest.mark.parametrize(
    ("name", "left"),
    [("op/*.parquet", None), pytest.param("frames.json", 1, marks=pytest.mark.slow)],
)
def test_a_day_of_whose_archive_a_part_is_not_there_is_archived_again(
    dsn: str, root: Path, first: Path, name: str, left: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    [file] = first.glob(name)
    content = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(content[:left])
    assert run(dsn, root) == 0
    assert f"{file.relative_to(first)} {'is missing' if left is None else 'has 1 bytes'}" in capsys.readouterr().err
    second = path_of(row_of(dsn).archive)
    assert attempts(root) == {second} != {first}
    assert run(dsn, root, "--verify") == 0
    # Bytes that changed in a file of the same length are found by who reads them; then a person names the day.
    [file] = second.glob(name)
    file.write_bytes(bytes(len(file.read_bytes())))
    assert run(dsn, root) == 0
    assert (attempts(root), run(dsn, root, "--verify")) == ({second}, 3)
    assert run(dsn, root, "--day", str(DAY)) == 0
    assert (attempts(root) == {second}, run(dsn, root, "--verify")) == (False, 0)


def test_the_later_attempt_stays_if_the_restored_tables_have_less(
    dsn: str, root: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = first.parent / str(uuid4())
    first.rename(later)
    change(dsn, "delete from attempt")
    before = row_of(dsn)
    assert run(dsn, root) == 1
    said = capsys.readouterr().err
    assert "attempt has other rows" in said
    assert f"{later} is complete, no row names it" in said
    assert (attempts(root), row_of(dsn)) == ({later}, before)


@pytest.mark.parametrize("more", [False, True])
def test_changed_tables_do_not_replace_their_archive_unless_a_person_says_so(
    dsn: str, root: Path, first: Path, more: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    change(dsn, "update op set reason = 'another'", "update attempt set outcome = 'refused'")
    if more:
        # More rows than before, and the changed ones among them.
        change(dsn, ADD, WRITE_OP)
    change(dsn, f"update day set held = '{{archive_differs}}' where day = '{DAY}'")
    before = row_of(dsn)
    for _ in range(2):
        assert run(dsn, root) == 1
        assert f"halfnote archive --day {DAY} replaces the archive" in capsys.readouterr().err
        assert (attempts(root), row_of(dsn)) == ({first}, before)
    assert run(dsn, root, "--day", str(DAY)) == 0
    second = path_of(row_of(dsn).archive)
    assert attempts(root) == {second} != {first}


def dropped_meanwhile(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """Have upkeep remove the day after its files were read back."""
    read_back = archive.read_back

    def then_gone(*given: Any) -> Any:
        described = read_back(*given)
        drop_tables(dsn)
        return described

    monkeypatch.setattr(archive, "read_back", then_gone)


def test_a_new_archive_counts_if_the_day_is_removed_meanwhile(
    dsn: str, root: Path, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [file] = (first / "op").glob("*.parquet")
    file.unlink()
    dropped_meanwhile(monkeypatch, dsn)
    assert run(dsn, root, "--day", str(DAY)) == 0
    second = path_of(row_of(dsn).archive)
    assert (row_of(dsn).state, attempts(root)) == ("gone", {second})
    assert run(dsn, root, "--verify") == 0


def test_another_archive_stays_if_the_day_is_removed_meanwhile(
    archived_day_made: MadeDay,
    dsn: str,
    root: Path,
    first: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(dsn, "update op set reason = 'another'")
    message_id = f"{archived_day_made.ids[0]}-0"
    dropped_meanwhile(monkeypatch, dsn)
    assert run(dsn, root, "--day", str(DAY)) == 1
    assert "it was removed from Postgres meanwhile" in capsys.readouterr().err
    monkeypatch.undo()
    assert path_of(row_of(dsn).archive) == first
    both = attempts(root)
    assert len(both) == 2
    assert all((one / "manifest.json").exists() for one in both)
    assert run(dsn, root) == 0
    assert attempts(root) == both
    # The other attempt has every body too.
    erase = ["--database-url", dsn, message_id, "--reason", "request 17"]
    assert redact.main(erase) == 1
    [other] = both - {first}
    assert f"The archive may have the body a second time, at file:{other}" in capsys.readouterr().err
    shutil.rmtree(other)
    assert redact.main(erase) == 0


def test_a_failure_of_the_database_at_one_day_leaves_the_other_days(
    dsn: str, root: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = DAY - timedelta(days=1)
    change(
        dsn,
        f"drop table {partition('half', before)}",
        f"update day set state = 'archiving', archive = replace(d.archive, '{DAY}', '{before}'), "
        f"archive_manifest = d.archive_manifest from day d where d.day = '{DAY}' and day.day = '{before}'",
        ADD,
    )
    assert run(dsn, root) == 1
    assert f"{before} was not archived" in capsys.readouterr().err
    assert path_of(row_of(dsn).archive) != first
    assert attempts(root) == {path_of(row_of(dsn).archive)}


def test_an_archive_that_is_not_mounted_is_no_new_one(
    dsn: str, root: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away = tmp_path / "unmounted"
    root.rename(away)
    for make in (False, True):
        if make:
            root.mkdir()
        change(dsn, ADD)
        before = row_of(dsn)
        assert run(dsn, root) == 1
        assert "Is the archive mounted?" in capsys.readouterr().err
        assert (row_of(dsn), list(root.rglob("*"))) == (before, [])
    root.rmdir()
    away.rename(root)
    assert run(dsn, root) == 0
    # The file alone is lost.
    (root / "halfnote.json").unlink()
    assert (run(dsn, root), run(dsn, root, "--adopt"), run(dsn, root)) == (1, 0, 0)
    assert rows(dsn, "select detail from audit where what = 'archive.adopt'") == [{"detail": {}}]


def test_a_redaction_is_not_called_finished_without_its_archive(
    dsn: str, root: Path, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(
        dsn,
        f"""update day set state = 'gone', archive_manifest = archive_manifest || '{{"rubbish": ["half/old"]}}'
        where day = '{DAY}'""",
    )
    first.rename(tmp_path / "away")
    before = row_of(dsn)
    assert run(dsn, root) == 1
    assert f"A redaction of {DAY} is not finished" in capsys.readouterr().err
    assert (row_of(dsn), first.exists()) == (before, False)
    (tmp_path / "away").rename(first)
    (first / "half" / "old").write_text("a body")
    assert run(dsn, root) == 0
    assert not (first / "half" / "old").exists()
