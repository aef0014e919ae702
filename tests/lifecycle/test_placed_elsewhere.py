"""A cluster outside of its data directory: the records of both, copies, moves and interrupted writes. Only for root."""

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.embedded_postgres import EmbeddedPostgres, EmbeddedPostgresError
from app.embedded_postgres.paths import find_paths

pytestmark = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root runs the server as another user"
)


@pytest.fixture
def closed() -> Iterator[Path]:
    """A directory that only root can enter; clusters of data directories below it are removed at the end."""
    directory = Path(tempfile.mkdtemp(prefix="halfnote-closed-"))
    yield directory
    homes = {home_of(record.parent) for record in directory.rglob("postgres-location")}
    shutil.rmtree(directory)
    for home in homes:
        if home.is_absolute() and home.parent.name == "halfnote":
            shutil.rmtree(home, ignore_errors=True)


def home_of(data_dir: Path) -> Path:
    return Path((data_dir / "postgres-location").read_text().strip())


def start_and_stop(data_dir: Path) -> None:
    EmbeddedPostgres.start(data_dir).stop()


def test_the_server_says_where_its_cluster_is(closed: Path) -> None:
    server = EmbeddedPostgres.start(closed / "data")
    server.stop()
    assert server.home == home_of(closed / "data")


def test_a_copy_does_not_open_the_originals_cluster(closed: Path) -> None:
    start_and_stop(closed / "original")
    home = home_of(closed / "original")
    assert (home / "data-directory").read_text() == f"{closed / 'original'}\n"
    shutil.copytree(closed / "original", closed / "copy")
    with pytest.raises(EmbeddedPostgresError, match=r"belongs to the data directory .*/original, not to .*/copy"):
        EmbeddedPostgres.start(closed / "copy")
    start_and_stop(closed / "original")


def test_a_moved_data_directory_is_refused_until_it_is_adopted(closed: Path) -> None:
    start_and_stop(closed / "before" / "data")
    (closed / "before").rename(closed / "after")
    moved = closed / "after" / "data"
    with pytest.raises(EmbeddedPostgresError, match="If the data directory was moved, write"):
        EmbeddedPostgres.start(moved)
    (home_of(moved) / "data-directory").write_text(f"{moved}\n")
    start_and_stop(moved)


def test_a_new_directory_at_the_path_of_a_moved_one_does_not_open_its_cluster(closed: Path) -> None:
    start_and_stop(closed / "data")
    (closed / "data").rename(closed / "moved")
    (home_of(closed / "moved") / "data-directory").write_text(f"{closed / 'moved'}\n")
    with pytest.raises(EmbeddedPostgresError, match="belongs to the data directory"):
        EmbeddedPostgres.start(closed / "data")
    assert not (closed / "data" / "postgres-location").exists()


def test_a_cluster_of_an_earlier_version_gets_the_record_and_a_link_is_no_other_directory(closed: Path) -> None:
    data_dir = closed / "data"
    start_and_stop(data_dir)
    owner = home_of(data_dir) / "data-directory"
    owner.unlink()
    (closed / "link").symlink_to(data_dir)
    start_and_stop(closed / "link")
    assert owner.read_text() == f"{data_dir}\n"
    assert find_paths(closed / "link").home == home_of(data_dir)


@pytest.mark.parametrize("text", ["", "\n", "halfnote/1030\n"])
def test_a_record_without_an_absolute_path_is_refused(closed: Path, text: str) -> None:
    (closed / "postgres-location").write_text(text)
    with pytest.raises(EmbeddedPostgresError, match="does not have the absolute path"):
        EmbeddedPostgres.start(closed)


def test_a_failed_write_leaves_no_record(closed: Path) -> None:
    """A limit of the file size fails the write after the file was made, like a full disk."""
    data_dir = closed / "data"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            find_paths(data_dir)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry.name for entry in data_dir.iterdir()] == ["postgres"]
    find_paths(data_dir)
    assert home_of(data_dir).is_dir()
