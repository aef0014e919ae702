"""A mark for tests that were written and never yet seen to pass as a whole: to be run alone on a quiet machine first,
and then, without the mark, always."""

import os

import pytest

UNSEEN = pytest.mark.skipif(
    "HALFNOTE_UNSEEN_TESTS" not in os.environ, reason="not yet seen to pass; HALFNOTE_UNSEEN_TESTS=1 runs it"
)
