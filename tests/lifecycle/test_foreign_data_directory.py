"""A data directory that is something else's is refused in one sentence that says what to do, and not changed."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.embedded_postgres.attach import borrowed
from app.embedded_postgres.foreign import refuse_foreign
from tests.support.processes import ROOT, free_port

NOBODY = 65534

OTHER_POSTGRES = {"PG_VERSION": "18\n", "base/1/1259": "rows", "postgresql.conf": "port = 5432\n"}
# Each with a part of what is said.
FOREIGN = {
    "of another Postgres": (OTHER_POSTGRES, "is the data directory of another Postgres"),
    "above another Postgres": ({f"postgres/{name}": text for name, text in OTHER_POSTGRES.items()}, "another Postgres"),
    # As in Arch Linux's /var/lib.
    "beside another postgres": ({"postgres/data/PG_VERSION": "18\n"}, r"not Halfnote's \(postgres/data\)"),
    "with files": ({"letters/a.txt": "dear", "b.txt": "b", "c": "", "d": ""}, r"\(b\.txt, c, d and 1 more\)"),
    "a checkout": ({"README.md": "# Shop", ".git/HEAD": "ref"}, r"\(README\.md\)"),
    "with an older cluster": ({"postgres/cluster/data/PG_VERSION": "16\n", "secrets.keys": "k"}, "made by Postgres 16"),
    "with a cluster cut short": ({"postgres/cluster/password": "x"}, "PG_VERSION is missing"),
}


@pytest.fixture
def place(data_dir: Path) -> Path:
    """A path at which there is nothing yet; the servers' user can reach it."""
    return data_dir.parent / "foreign"


def fill(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def contents(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a directory, itself included: mode, time of the last change, and what is in it."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        status = path.stat()
        body = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, body)
    return found


def refused(directory: Path, said: str) -> None:
    """Assert that no server starts there, and that nothing changes."""
    before = contents(directory)
    with pytest.raises(EmbeddedPostgresError, match=said) as refusal:
        EmbeddedPostgres.start(directory).kill()
    assert contents(directory) == before
    text = str(refusal.value)
    assert "HALFNOTE_DATA_DIR" in text
    assert "\n" not in text


@pytest.mark.parametrize(("files", "said"), FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_directory_is_refused_and_left_as_it_is(files: dict[str, str], said: str, place: Path) -> None:
    place.mkdir()
    fill(place, files)
    refused(place, said)


def test_a_file_is_refused_and_left_as_it_is(place: Path) -> None:
    place.write_text("a letter")
    refused(place, "is a file. Set HALFNOTE_DATA_DIR to a new or an empty directory")


@pytest.mark.parametrize(("name", "mode"), [("there", 0o555), ("there/not/yet", 0o555), ("there", 0o000)])
def test_a_directory_that_cannot_be_written_is_refused(name: str, mode: int) -> None:
    with tempfile.TemporaryDirectory() as above:
        Path(above).chmod(0o755)
        there = Path(above) / "there"
        there.mkdir()
        there.chmod(mode)
        before = contents(Path(above))
        with without_root(), pytest.raises(EmbeddedPostgresError, match=r"Permission denied.*choose another HALFNOTE_"):
            EmbeddedPostgres.start(Path(above) / name).kill()
        assert contents(Path(above)) == before


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Run the block as a user whom permissions bind."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {
            "lost+found/x": "",
            ".gitignore": "*",
            "secrets.keys": "k",
            "admin.key": "k",
            "reconciliation/report.html": "",
        },
        {"postgres/cluster.new-x1/password": "x", "postgres/lock": "1", "postgres/log/startup.log": ""},
        {"postgres/cluster/data/PG_VERSION": "18\n", "notes.txt": "ours, with a note"},
        {"postgres-location": "/var/lib/halfnote/1030", "notes.txt": "ours, with a note"},
    ],
)
def test_an_empty_directory_a_volume_and_our_own_will_do(files: dict[str, str], place: Path) -> None:
    place.mkdir()
    fill(place, files)
    refuse_foreign(place)


def test_commands_on_the_database_refuse_it_too(place: Path) -> None:
    place.mkdir()
    fill(place, OTHER_POSTGRES)
    before = contents(place)
    with pytest.raises(EmbeddedPostgresError, match="another Postgres"), borrowed(place):
        pass
    assert contents(place) == before


def test_serve_says_it_in_one_line_and_makes_nothing(place: Path) -> None:
    place.mkdir()
    fill(place, OTHER_POSTGRES)
    before = contents(place)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HALFNOTE_")}
    ended = subprocess.run(
        [sys.executable, "-m", "app.cli", "serve", f"--port={free_port()}"],
        cwd=ROOT,
        env=environment | {"HALFNOTE_DATA_DIR": str(place)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    [line] = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert line.startswith(f"halfnote: {place} is the data directory of another Postgres")
    assert contents(place) == before
