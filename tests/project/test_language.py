"""Names and prose follow CONTRIBUTING.md: one name per thing, and plain American English without banned phrases."""

import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BANNED = (
    "alas",
    "anew",
    "anybody",
    "as it likes",
    "came about",
    "comes about",
    "forthwith",
    "hence",
    "henceforth",
    "is told",
    "lest",
    "let go of",
    "lets go of",
    "mend",
    "mended",
    "mends",
    "need not",
    "nobody",
    "somebody",
    "thereby",
    "thereof",
    "thereupon",
    "what became of",
    "what came of",
    "whence",
    "wherein",
    "who asks",
    "who looks",
    "whoever",
    "whomever",
)
BRITISH = (
    r"analys(e|ed|es|ing)",
    r"(behavi|col|fav|hon|lab|neighb|rig)our\w*",
    r"(cancel|dial|label|level|model|signal|travel)l(ed|ing)",
    r"(author|final|initial|normal|organ|optim|recogn|serial|summar|synchron|util)is(e|ed|es|ing|ation)",
    r"(cent|fib|met)re",
    r"(amongst|whilst|licence|defence|grey|catalogue)",
)
# These pages and tests name the banned words in order to ban them.
EXEMPT = ("CONTRIBUTING.md", "LICENSE", "docs/glossary.md", "tests/project/test_language.py")
# Files of other projects.
VENDORED = (
    "app/console/static/htmx",
    "app/console/static/licenses/",
    "app/console/static/swagger-ui",
    "app/rocketmq/protocol/",
    "tests/console/axe/",
)
# Not prose: names of other APIs, stored words of the API (a replay's state), and the Unix account.
NAMES_OF_OTHERS = re.compile(r"\b(CancelledError|\w*CANCELLED|cancelled|cancelling\(\))|[`\"]nobody[`\"]|cancelling\(")
# fmt: off
TEXT = (
    ".c", ".go", ".j2", ".java", ".js", ".md", ".mjs", ".py", ".sh", ".sql", ".toml", ".tpl", ".txt", ".yaml", ".yml",
)
# fmt: on

_banned = re.compile(rf"\b({'|'.join([*BANNED, *BRITISH])})\b", re.I)
_banned_in_lower_case = re.compile(_banned.pattern)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def is_prose(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    if name in EXEMPT or name.startswith(VENDORED) or name.endswith(".lock") or not path.is_file():
        return False
    return path.suffix in TEXT or path.name in ("Dockerfile", "Makefile") or name.startswith((".ci/", "scripts/"))


def lines_of(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines to read. Of a test only comments and docstrings: its names and strings are input."""
    text = path.read_text()
    # Most files have no such phrase, and a search of the whole text in lower case is fast.
    if not _banned_in_lower_case.search(text.lower()):
        return []
    lines = list(enumerate(text.splitlines(), 1))
    if path.suffix != ".py" or path.relative_to(ROOT).parts[0] != "tests":
        return lines
    prose: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            prose.update(range(token.start[0], token.end[0] + 1))
    return [line for line in lines if line[0] in prose]


def test_no_text_has_a_banned_phrase() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()[:100]}"
        for path in tracked()
        if is_prose(path)
        for number, line in lines_of(path)
        for match in _banned.finditer(NAMES_OF_OTHERS.sub("", line))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", ["app", "spark", "sdk/halfnote"])
def test_a_class_name_means_one_thing(folder: str) -> None:
    names = Counter(
        name
        for path in (ROOT / folder).rglob("*.py")
        # Python's parser takes seconds for all files.
        for name in re.findall(r"^[ \t]*class (\w+)[:(\[]", path.read_text(), re.MULTILINE)
    )
    assert [name for name, times in names.items() if times > 1 and not name.startswith("_")] == []


def test_at_most_15_files_lie_directly_in_app() -> None:
    assert len(list((ROOT / "app").glob("*.py"))) <= 15
