"""Each block of the client's pages is of a kind that a test runs; the packages that the pages install exist."""

import re
import tomllib

import pytest

from tests.sdk.doc_blocks import ROOT

# These run them: tests/system/test_protocol.py, tests/system/test_example_producers.py, and here test_docs,
# test_guides,
# test_client_pages.
RUN = {
    "sdk/README.md": {"python", "bash"},
    "docs/protocol.md": {"bash", "sql", "json", "shell"},
    "docs/guarantees.md": {"python", "bash"},
    "docs/from-an-outbox.md": {"python", "bash"},
    "docs/from-rocketmq.md": {"python", "bash"},
    "docs/from-dtm.md": {"python", "bash"},
    **{f"docs/clients/{name}.md": {"python", "bash"} for name in ("asyncpg", "django", "fastapi", "flask")},
    "docs/clients/sqlalchemy.md": {"python", "bash"},
    "docs/clients/reference.md": {"bash"},
}
# A drawing, the signature to try one's own by, which tests/system/test_protocol.py reads, and two forms of
# requests, which tests/checkback (test_claimed_checks.py, test_check_batches.py) send.
SHOWN = {
    "docs/protocol.md": [
        "1. POST /half",
        "secret     whsec_",
        '{"type": "halfnote.checks"',
        "POST /producer-groups/batch/checks/answers",
    ]
}


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_these_are_all_pages_about_clients() -> None:
    clients = {f"docs/clients/{page.name}" for page in (ROOT / "docs/clients").glob("*.md")}
    assert {page for page in RUN if page.startswith("docs/clients/")} == clients


@pytest.mark.parametrize("page", RUN)
def test_each_block_is_of_a_kind_that_is_run(page: str) -> None:
    found = blocks(page)
    assert {language for language, _ in found} - {""} <= RUN[page]
    shown = [text for language, text in found if not language]
    assert len(shown) == len(SHOWN.get(page, []))
    assert all(text.startswith(begins) for text, begins in zip(shown, SHOWN.get(page, []), strict=True))


@pytest.mark.parametrize("page", RUN)
def test_extras_that_are_named_exist(page: str) -> None:
    known = tomllib.loads((ROOT / "sdk/pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"halfnote\[([^]]+)\]", (ROOT / page).read_text()):
        assert set(extras.split(",")) <= set(known)


@pytest.mark.parametrize("page", [page for page in RUN if "python" in RUN[page] or "reference" in page])
def test_each_page_about_the_client_says_how_to_install_it(page: str) -> None:
    """Before its first block of Python."""
    text = (ROOT / page).read_text()
    assert re.search(r"pip install '?halfnote", text.partition("```python")[0])
