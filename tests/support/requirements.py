"""Missing requirements of a test: the test is skipped, or fails where the environment says that it must run."""

import os
from typing import NoReturn

import pytest


def absent(reason: str, *needed_by: str) -> NoReturn:
    """Skip the test; fail it if HALFNOTE_TEST_<needed_by> is `required`, as the make targets for such tests set it.

    needed_by: DEPS (what `make test-deps` brings), HELM, IMAGES, BUCKET (what these targets of make run), MACHINE (what
    a machine must allow or have: namespaces, a clone with its history, Debian's Postgres).
    """
    if any(os.environ.get(f"HALFNOTE_TEST_{name}") == "required" for name in needed_by):
        pytest.fail(reason)
    pytest.skip(reason)
