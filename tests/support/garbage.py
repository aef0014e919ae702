"""No garbage collection while tests are collected: what is made then stays until the end of the run.

Without these hooks Python looks through all modules and tests again and again: more than one of nine CPU seconds of
each process that collects.
"""

import atexit
import gc


def pytest_collection() -> None:
    """Let the modules and the tests be made without a look for garbage among them."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude what was collected from garbage collection, which goes on for what the tests make."""
    gc.freeze()
    gc.enable()


# Otherwise DuckDB complains when the interpreter ends.
atexit.register(gc.unfreeze)
