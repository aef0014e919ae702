"""The number of examples of a property test: few in `make test`, all of them in `make test-all`."""

import os

# One example in this many, and at least this many.
_SHARE, _FEWEST = 10, 3


def examples(full: int) -> int:
    """Return `full` if HALFNOTE_TEST_EXAMPLES is `all`, else a tenth of it, but at least three."""
    return full if os.environ.get("HALFNOTE_TEST_EXAMPLES") == "all" else max(full // _SHARE, _FEWEST)
