"""No guide puts a secret on a command line, where every user of the machine can read it."""

import re
from collections.abc import Iterator

from tests.support.processes import ROOT

# A block without a language shows commands too.
SHELLS = {"", "sh", "bash", "console"}
# An inline `NAME=value` is in the environment of the command, and `printf` is the shell's own: neither is an argument.
OF_THE_SHELL = re.compile(r"\s*(?:export |printf |\w+=)")
SECRET = re.compile(
    r"--secret\b|--from-literal|\b(?:secret|password|token)=\S|['\"]Authorization: Bearer"
    r"|://[^\s:/@]+:[^\s@]+@|:PASSWORD\b",
    re.IGNORECASE,
)


def commands_of(text: str) -> Iterator[str]:
    """Yield the lines of a page's blocks of commands, without comments."""
    language = None
    for line in text.splitlines():
        if (fence := re.match(r"\s*(?:[-*] |\d+\. )?```(\w*)", line)) is not None:
            language = fence[1] if language is None else None
        elif language in SHELLS and not line.lstrip().startswith("#"):
            yield line


def test_no_command_of_a_guide_has_a_secret_as_an_argument() -> None:
    pages = [ROOT / "README.md", ROOT / "sdk" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [(page, line) for page in pages for line in commands_of(page.read_text())]
    assert len(lines) > 200
    risky = [(page, line) for page, line in lines if SECRET.search(line) and not OF_THE_SHELL.match(line)]
    assert [f"{page.relative_to(ROOT)}: {line.strip()}" for page, line in risky] == []
