"""The service without the code that accepts traces: the baseline for the cost of disabled tracing.

An import hook removes the statements that name a part of this code from the modules of the hot paths. Imports and
parameters stay; the parameters get None or their default.
"""

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

HOT = ("app.server.request_pipeline", "app.routers.half", "app.routers.end", "app.routers.messages")
PARTS = frozenset({"trace", "traced", "incoming", "current", "note_trace", "tracing"})


class Without(ast.NodeTransformer):
    """Removes simple statements and `if` statements that name a part, and passes None for arguments that do."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Pass None for an argument that names a part; leave it out if it has a name, and so a default."""
        self.generic_visit(node)
        node.args = [ast.Constant(None) if _names_part(argument) else argument for argument in node.args]
        node.keywords = [keyword for keyword in node.keywords if not _names_part(keyword.value)]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Remove an assignment to a part."""
        return None if any(_names_part(target) for target in node.targets) else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        """Remove a call of a part."""
        called = node.value.func if isinstance(node.value, ast.Call) else None
        return None if called is not None and _names_part(called) else self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Remove an `if` whose condition names a part."""
        return None if _names_part(node.test) else self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Empty the body of a function that is a part; the function stays, because other modules import it."""
        if node.name in PARTS:
            node.body = [ast.Pass()]
        return self.generic_visit(node)


def _names_part(node: ast.AST) -> bool:
    return any(
        (isinstance(part, ast.Name) and part.id in PARTS) or (isinstance(part, ast.Attribute) and part.attr in PARTS)
        for part in ast.walk(node)
    )


def without(source: bytes | str) -> ast.Module:
    """Return a module's syntax tree without the parts."""
    return ast.fix_missing_locations(Without().visit(ast.parse(source)))  # type: ignore[no-any-return]


class Loader(SourceFileLoader):
    """Compiles a module without the parts; it neither reads nor writes bytecode files."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the module without the parts."""
        return compile(without(self.get_data(self.path)), self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds the modules of the hot paths for the loader above."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of these modules."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in HOT else None
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


def installed() -> None:
    """Install the import hook. Raises RuntimeError if a module of the hot paths is imported already."""
    early = [name for name in HOT if name in sys.modules]
    if early:
        raise RuntimeError(f"{', '.join(early)} was imported before the hook was installed")
    sys.meta_path.insert(0, Finder())
