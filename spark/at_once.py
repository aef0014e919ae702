"""Parts of one day's work beside each other, so that Spark plans one while it runs another."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# As many as keep all cores busy while one of them is being planned; what runs is Spark's to divide.
ABREAST = 2


def at_once(parts: Sequence[Callable[[], T]]) -> list[T]:
    """Return what the parts return, in their order; what the first of them raises is raised.

    The others are not waited for then: the session is about to stop, and ends them.
    """
    pool = ThreadPoolExecutor(ABREAST)
    try:
        return [running.result() for running in [pool.submit(part) for part in parts]]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
