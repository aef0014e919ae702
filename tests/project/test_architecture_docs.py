"""Paths and symbols that the pages about the code name exist, and so do the tables of the glossary."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from app.models import metadata

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / f"{name}.md" for name in ("glossary", "architecture", "request-walk")]
# A path in backquotes, of one of the folders that hold code, with or without a symbol: `app/relay/loop.py:step`.
REFERENCE = re.compile(
    r"`((?:app|bench|demo|docs|examples|helm|migrations|scripts|sdk|spark|tests)/[^`:\s]*)(?::([^`]+))?`"
)


@cache
def symbols(path: Path) -> frozenset[str]:
    """Return what a module defines: names, and members of classes as `Class.member`."""
    return frozenset(_defined(ast.parse(path.read_text()).body, ""))


def _defined(body: list[ast.stmt], before: str) -> list[str]:
    names = []
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append(before + name)
            case ast.ClassDef(name=name):
                names += [before + name, *_defined(node.body, f"{before}{name}.")]
            case ast.Assign(targets=targets):
                names += [before + target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(before + name)
            case ast.If():
                names += _defined([*node.body, *node.orelse], before)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_symbols_exist(page: Path) -> None:
    references = REFERENCE.findall(page.read_text())
    assert references
    for path, symbol in references:
        assert (ROOT / path).exists(), path
        if symbol:
            assert symbol in symbols(ROOT / path), f"{path}:{symbol}"


def test_tables_of_the_glossary_exist() -> None:
    glossary = (DOCS / "glossary.md").read_text()
    lists = re.findall(r"\btables? ((?:`\w+`(?:, )?)+)", glossary)
    tables = {table for listed in lists for table in re.findall(r"`(\w+)`", listed)}
    assert {"half", "op", "outbox"} <= tables <= metadata.tables.keys()
    columns = re.findall(r"`(\w+)\.(\w+)`", glossary)
    assert columns
    for table, column in columns:
        assert column in metadata.tables[table].columns, f"{table}.{column}"


def test_a_term_is_defined_once() -> None:
    glossary = (DOCS / "glossary.md").read_text()
    cells = re.findall(r"^\| (\*\*.*?) \|", glossary, re.MULTILINE)
    terms = [term for cell in cells for term in re.findall(r"\*\*(.*?)\*\*", cell)]
    assert len(terms) > 80
    assert len(terms) == len(set(terms))


def test_the_layers_are_those_of_the_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [contract] = [c for c in project["tool"]["importlinter"]["contracts"] if c["name"] == "Nine layers"]
    layers = contract["layers"]
    numbered = {(len(layers) - i, name) for i, layer in enumerate(layers) for name in layer.split(" | ")}
    page = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| (\d) \| `(\w+)` \|", page, re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == numbered
    assert len(rows) == len(numbered)


def test_each_invariant_names_its_file_and_its_test() -> None:
    table = (DOCS / "architecture.md").read_text().partition("## Invariants")[2]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for _, held_by, shown_by in rows:
        assert REFERENCE.search(held_by) or "pyproject.toml" in held_by, held_by
        assert "`tests/" in shown_by or "`make check`" in shown_by, shown_by
