"""How much the database may still grow, where a process can know it."""

from shutil import disk_usage

from app.config import Settings


def free_bytes(settings: Settings, size: int) -> int | None:
    """Return how many bytes the database, of `size` bytes, may still grow; None if the process cannot know."""
    if settings.database_disk_bytes is not None:
        return max(0, settings.database_disk_bytes - size)
    return disk_usage(settings.data_dir).free if settings.embedded else None
