"""How many cores this process may use: those of its affinity, or fewer by the CPU limit of its control group."""

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the number of whole cores, at least 1. What cannot be read limits nothing."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([allowed, *_limits(groups, own)])))


def _limits(groups: Path, own: Path) -> Iterator[float]:
    """Yield the limits in cores of the own control group and of those above it, of version 2 and of version 1."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    named = [Path(line.split(":", 2)[2].strip("/")) for line in lines if line.startswith("0::")]
    # In a container the own group is the root of what it sees.
    for group in {Path(), *named, *(parent for one in named for parent in one.parents)}:
        quota, _, period = _text(groups / group / "cpu.max").partition(" ")
        yield from _cores(quota, period)
    older = groups / "cpu"
    yield from _cores(_text(older / "cpu.cfs_quota_us"), _text(older / "cpu.cfs_period_us"))


def _cores(quota: str, period: str) -> Iterator[float]:
    # No limit is `max`, or -1 in version 1.
    if quota.isdigit() and period.isdigit() and int(period):
        yield int(quota) / int(period)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
