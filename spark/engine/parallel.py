"""Runs parts of one day's work in parallel, so that Spark plans one while it runs another."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Enough parts to keep all cores busy while Spark plans one of them. Spark divides the cores among running parts.
ABREAST = 2


def at_once(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Return the parts' results in order; raise the first error of a part.

    After an error the other parts are not awaited: the session is about to stop and ends them.
    """
    pool = ThreadPoolExecutor(ABREAST)
    try:
        return [running.result() for running in [pool.submit(part) for part in parts]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
