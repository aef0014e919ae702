"""The pages whose code runs as printed install what the code imports, so that it runs in a fresh environment."""

import ast
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution, packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.sdk.doc_blocks import ROOT, blocks_of

PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "docs").rglob("*.md")
    if "```bash\npip install 'halfnote[" in page.read_text()
)
CLIENT = tomllib.loads((ROOT / "sdk/pyproject.toml").read_text())["project"]
# Which distribution a page's text needs besides its imports: a database's driver, and a program of its commands.
NEEDS = {
    r"\+asyncpg": "asyncpg",
    r"\+psycopg|django\.db\.backends\.postgresql": "psycopg",
    r"^uvicorn ": "uvicorn",
    r"^flask ": "flask",
}


def with_dependencies(requirement: str) -> Iterator[str]:
    """Yield the names of a requirement of a page and of what pip installs with it."""
    wanted = Requirement(requirement)
    yield canonicalize_name(wanted.name)
    if wanted.name == "halfnote":
        further = [*CLIENT["dependencies"], *(one for extra in wanted.extras for one in extras(extra))]
    else:
        further = [one for one in distribution(wanted.name).requires or [] if required(one, wanted.extras)]
    for one in further:
        yield from with_dependencies(one.split(";")[0])


def extras(name: str) -> list[str]:
    """Return what an extra of the client installs."""
    return list(CLIENT["optional-dependencies"][name])


def required(requirement: str, chosen: set[str]) -> bool:
    """Return whether a dependency is installed with an extra that was chosen, or with none, on this machine."""
    marker = Requirement(requirement).marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in chosen or {""})


def imported(blocks: list[str]) -> set[str]:
    """Return the packages that blocks import: not those of Python, and not the page's own files."""
    found: set[str] = set()
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    own = {re.split(r"[/.]", name)[0] for block in blocks for name in re.findall(r"\A# (\S+\.py)\n", block)}
    return found - own - {"halfnote"} - sys.stdlib_module_names


@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_what_its_code_imports(page: str) -> None:
    text = (ROOT / page).read_text()
    [line] = re.findall(r"```bash\npip install (.*)\n```", text)
    installed = {name for requirement in shlex.split(line) for name in with_dependencies(requirement)}
    places = packages_distributions()
    needed = {canonicalize_name(places[module][0]) for module in imported(blocks_of(page))}
    needed |= {name for pattern, name in NEEDS.items() if re.search(pattern, text, re.MULTILINE)}
    assert needed <= installed


@pytest.mark.parametrize("page", [*PAGES, "docs/clients/reference.md"])
def test_a_page_installs_the_same_from_a_clone(page: str) -> None:
    text = (ROOT / page).read_text()
    [line] = re.findall(r"```bash\npip install (.*)\n```", text)
    [cloned] = re.findall(r"^Until 0\.1\.0 is released: `pip install (.*)` in a clone", text, re.MULTILINE)
    assert shlex.split(cloned) == [re.sub(r"^halfnote\b", "./sdk", one) for one in shlex.split(line)]
