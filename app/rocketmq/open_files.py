"""The limit of open files, sockets included, of the gateway's process."""

from contextlib import suppress

import structlog

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

log = structlog.get_logger(__name__)

# What the process needs besides connections of clients: the program itself, its log, requests to Halfnote.
OTHER_FILES = 512


def raise_open_files(connections: int) -> int | None:
    """Raise the limit to the hard limit; return how many files may be open, or None without a limit.

    A common default is 1,024. `connections`: how many clients may have, on all ports. A warning says that they do not
    fit.
    """
    if resource is None:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems report a hard limit that they do not grant.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return None
    if soft < connections + OTHER_FILES:
        log.warning(
            "rocketmq_open_files_are_few",
            limit=soft,
            connections=connections,
            hint="raise the hard limit of open files (ulimit -Hn), or give a smaller --max-connections",
        )
    return soft
