"""Programs that stand as text in the tests and the benches import names that exist."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^\s*from ((?:app|spark|tests)(?:\.\w+)*) import ([\w, ]+)$", re.MULTILINE)


def embedded_imports(source: str) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import inside a string of the source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in IMPORT.findall(node.value):
                for name in names.split(","):
                    yield module, name.split()[0]


def test_the_search_finds_an_import_in_a_string() -> None:
    source = 'PROGRAM = """\nfrom app.clock import system_now, Clock as Time\nfrom json import dumps\n"""'
    assert list(embedded_imports(source)) == [("app.clock", "system_now"), ("app.clock", "Clock")]


def test_embedded_imports_resolve() -> None:
    """A program in a string breaks only when it runs, which slow tests seldom do."""
    files = [file for folder in ("tests", "bench") for file in (ROOT / folder).rglob("*.py") if file != Path(__file__)]
    found = {(file, *named) for file in files for named in embedded_imports(file.read_text())}
    assert len(found) >= 3
    for file, module, name in sorted(found):
        assert hasattr(importlib.import_module(module), name), f"{file.relative_to(ROOT)}: {module} has no {name}"
