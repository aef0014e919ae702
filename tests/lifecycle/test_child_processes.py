"""Which processes `halfnote serve` starts: by its role, by `--workers`, and by the cores that it may use."""

from pathlib import Path

import pytest

from app.cli import server_process
from app.cli.server_process import child_roles
from app.cli.usable_cores import usable_cores
from app.config import Settings

ALL_CORES = 64


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(ALL_CORES)), raising=False)


@pytest.mark.parametrize(
    ("workers", "role", "usable", "roles"),
    [
        ("auto", "all", 2, ["api", "worker"]),
        ("auto", "all", 1, []),
        ("auto", "api", 8, []),
        ("auto", "worker", 8, []),
        (1, "all", 8, []),
        (3, "all", 1, ["api", "api", "api", "worker"]),
        (2, "api", 8, ["api", "api"]),
        (2, "worker", 8, ["worker", "worker"]),
    ],
)
def test_processes_of_a_service(
    monkeypatch: pytest.MonkeyPatch, workers: str | int, role: str, usable: int, roles: list[str]
) -> None:
    monkeypatch.setattr(server_process, "usable_cores", lambda: usable)
    settings = Settings(_env_file=None, workers=workers, role=role)  # type: ignore[call-arg,arg-type]
    assert child_roles(settings) == roles


@pytest.mark.parametrize("number", ["1", "64", "auto"])
def test_numbers_of_processes(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("HALFNOTE_WORKERS", number)
    assert str(Settings(_env_file=None).workers) == number  # type: ignore[call-arg]


@pytest.mark.parametrize("number", ["0", "65", "-1", "1.5", "²", "", "Auto"])
def test_refused_numbers_of_processes(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("HALFNOTE_WORKERS", number)
    with pytest.raises(ValueError, match="must be `auto`, or a number from 1 to 64"):
        Settings(_env_file=None)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({}, None, ALL_CORES),
        ({"cpu.max": "max 100000"}, "0::/", ALL_CORES),
        ({"cpu.max": "150000 100000"}, "0::/", 1),
        ({"cpu.max": "200000 100000"}, None, 2),
        ({"cpu.max": "50000 100000"}, "0::/", 1),
        # A group above the own one limits it as well.
        ({"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "max 100000"}, "0::/pod/box", 3),
        ({"pod/cpu.max": "max 100000", "pod/box/cpu.max": "250000 100000"}, "9:cpu:/x\n0::/pod/box", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, ALL_CORES),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, None, 4),
        ({"cpu.max": "nonsense"}, "0::/../../other", ALL_CORES),
    ],
)
def test_cores_within_the_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], own: str | None, cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    membership = tmp_path / "membership"
    if own is not None:
        membership.write_text(f"{own}\n")
    assert usable_cores(tmp_path, membership) == cores
