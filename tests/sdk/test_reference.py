"""docs/clients/reference.md: generated from the docstrings, and complete."""

import inspect
import re
from importlib import import_module
from typing import Any

import halfnote
import halfnote.testing
import pytest

from scripts.client_reference import MODULES, PAGE, page, public
from tests.sdk.doc_blocks import ROOT
from tests.sdk.servers import configure

PAGES = [
    ROOT / "sdk/README.md",
    *sorted((ROOT / "docs").glob("from-*.md")),
    *sorted((ROOT / "docs/clients").glob("*.md")),
]
IMPORTED = re.compile(r"^from (halfnote[\w.]*) import (.+)$", re.MULTILINE)


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "make docs"


def members_of(found: Any) -> list[str]:
    """Return the public names of a class: fields, properties and methods, also of its private bases."""
    own = [found, *(base for base in found.__mro__ if base.__name__.startswith("_"))]
    names = {name for base in own for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    return sorted(name for name in names if not name.startswith("_"))


@pytest.mark.parametrize(("module", "name"), list(public()))
def test_each_public_member_is_named(module: str, name: str) -> None:
    """Python itself says what a class has."""
    configure()
    found = getattr(import_module(module), name)
    _, _, rest = PAGE.read_text().partition(f"\n## {module}\n")
    part = re.split(r"\n##+ ", rest.partition(f"\n### {name}\n")[2])[0]
    assert part
    if inspect.isclass(found) and not issubclass(found, (BaseException, halfnote.Transaction)):
        for member in members_of(found):
            assert re.search(rf"`(async )?(def |with )?{member}\b", part), member


def test_each_module_that_a_page_imports_from_is_part_of_it() -> None:
    listed = set(public())
    for document in PAGES:
        for module, names in IMPORTED.findall(document.read_text()):
            assert module in MODULES, f"{document.name}: {module}"
            for name in names.split(", "):
                assert (module, name.strip()) in listed, f"{document.name}: {module} {name}"


def test_all_that_the_package_exports_is_public() -> None:
    listed = set(public())
    for package in (halfnote, halfnote.testing):
        assert {(package.__name__, name) for name in package.__all__} <= listed
