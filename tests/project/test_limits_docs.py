"""docs/limits.md: the limits that are constants of the code."""

import re
from pathlib import Path

from scripts import limits_docs

APP = Path(__file__).parent.parent.parent / "app"
NUMBER = re.compile(r"^([A-Z][A-Z_]*_MAX(?:_[A-Z]+)?|[A-Z][A-Z_]*_LIMIT(?:_[A-Z]+)?) = [0-9]", re.MULTILINE)
# Bounds of a column's type.
OF_TYPES = {"ID_MAX", "OFFSET_MAX", "REPLAY_MAX"}
# The sizes of a NOTIFY and of a datagram, which are split, of batches, of a cache, and of the reads of a turn.
INTERNAL = {
    "app/checkback/loop.py:BATCH_MAX",
    "app/database/notifier.py:PAYLOAD_MAX_BYTES",
    "app/egress/http_client.py:TARGETS_MAX",
    "app/runtime/wake_up_socket.py:DATAGRAM_MAX_BYTES",
    "app/runtime/wake_up_socket.py:READS_MAX",
}
# Repeats one that is on the page.
SAME = {"PAGE_MAX"}


def test_the_page_of_limits_is_what_the_code_says() -> None:
    assert limits_docs.PAGE.read_text() == limits_docs.page(), "run `make docs`"


def test_each_fixed_limit_is_on_the_page() -> None:
    page = limits_docs.page()
    missing = [
        place
        for path in sorted(APP.rglob("*.py"))
        for name in NUMBER.findall(path.read_text())
        if name not in OF_TYPES | SAME
        and (place := f"{path.relative_to(APP.parent)}:{name}") not in INTERNAL
        and f"`{place}`" not in page
    ]
    assert not missing, "name these in scripts/limits_docs.py, or make them settings"
