"""How much the database may still grow, where a process can know it."""

from pathlib import Path
from shutil import disk_usage


def free_bytes(disk_bytes: int | None, embedded_home: Path | None, size: int) -> int | None:
    """Return how many bytes the database, of `size` bytes, may still grow; None if the process cannot know.

    `disk_bytes`: what the settings say that it has. `embedded_home`: the directory of the embedded Postgres.
    """
    if disk_bytes is not None:
        return max(0, disk_bytes - size)
    return None if embedded_home is None else disk_usage(embedded_home).free
