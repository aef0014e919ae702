"""Write docs/clients/reference.md from the docstrings of the Python client: `make docs`.

It reads the sources, so that a signature has its annotations as they are written.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "clients" / "reference.md"
SOURCES = ROOT / "sdk" / "halfnote"

HEAD = """# Reference of the Python client

Every public class, function and constant of `halfnote`, by module. `make docs` generates this page from the docstrings.
The [README](../../sdk/README.md) explains how they work together.

```bash
pip install halfnote
```

Until 0.1.0 is released: `pip install ./sdk` in a clone ([installation](../../sdk/README.md#installation)).
"""

# Each public module and its members; None: those that it imports by `__all__`.
MODULES: dict[str, tuple[str, ...] | None] = {
    "halfnote": None,
    "halfnote.barrier": ("Barrier", "AsyncBarrier"),
    "halfnote.databases.sqlalchemy": ("SqlAlchemy", "AsyncSqlAlchemy"),
    "halfnote.databases.asyncpg": ("Asyncpg",),
    "halfnote.databases.psycopg": ("AsyncPsycopg",),
    "halfnote.databases.dbapi": ("DbApi",),
    "halfnote.databases.django": ("Django",),
    "halfnote.databases.base": ("NotInTransaction",),
    "halfnote.block": ("OpenTransaction",),
    "halfnote.units": ("in_asyncpg", "in_async_psycopg", "in_psycopg", "in_dbapi", "in_django"),
    "halfnote.delivery": ("DeliveryEndpoint",),
    "halfnote.inbox": ("Inbox", "AsyncInbox", "Received", "Reject", "Undone"),
    "halfnote.message": (
        "Message",
        "NotAMessage",
        "from_http",
        "from_aio_pika",
        "from_nats",
        "from_aiokafka",
        "from_redis",
    ),
    "halfnote.certificates": ("Certificates", "SyncCertificates", "Certificate", "CertificateEntry"),
    "halfnote.outgoing": ("serializable",),
    "halfnote.ids": ("new_id", "id_time"),
    "halfnote.testing": None,
    "halfnote.testing.fixtures": ("halfnote_command", "halfnote_service"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def page() -> str:
    """Return the whole page."""
    return HEAD + "".join(section(name, members) for name, members in MODULES.items())


def section(module: str, members: tuple[str, ...] | None) -> str:
    """Return a module's part."""
    found = exported(module) if members is None else dict.fromkeys(members, module)
    shown = "".join(member(name, found[name]) for name in sorted(found, key=str.lower))
    return f"\n## {module}\n{shown}"


def exported(module: str) -> dict[str, str]:
    """Return the names of a package's `__all__`, each with the module that defines it."""
    places = {}
    for node in tree(module).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            places.update({alias.name: node.module for alias in node.names})
    for node in tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {name: places[name] for name in ast.literal_eval(node.value)}
    raise ValueError(f"{module} has no __all__")


def member(name: str, module: str) -> str:
    """Return the part of a class, a function or a constant. Raises LookupError if the module does not define it."""
    for node in tree(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return of_class(node, tree(module))
        if isinstance(node, Function) and node.name == name:
            return f"\n### {name}\n\n`{signature(node)}`\n\n{text(node)}"
        if name in assigned(node):
            return f"\n### {name}\n\n`{assignment(node)}`\n"
    raise LookupError(f"{module} does not define {name}")


def assignment(node: ast.stmt) -> str:
    """Return an assignment. Versions of Python differ in the parentheses of several names at the left."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        names = ", ".join(ast.unparse(name) for name in node.targets[0].elts)
        return f"{names} = {ast.unparse(node.value)}"
    return ast.unparse(node)


def of_class(node: ast.ClassDef, module: ast.Module) -> str:
    """Return a class with its fields and its public methods and properties, and those of a private base."""
    names = [ast.unparse(base) for base in node.bases]
    bases = f"({', '.join(name for name in names if not private(name))})".replace("()", "")
    shown = f"\n### {node.name}\n\n`class {node.name}{bases}`\n\n{text(node)}"
    body = list(node.body)
    for base in module.body:
        if isinstance(base, ast.ClassDef) and base.name in names and private(base.name):
            body += [one for one in base.body if not (isinstance(one, Function) and one.name == "__init__")]
    fields = [one for one in body if isinstance(one, ast.AnnAssign) and not private(ast.unparse(one.target))]
    values = [one for one in body if isinstance(one, ast.Assign) and assigned(one)]
    shown += "".join(f"- `{assignment(one)}`\n" for one in [*fields, *values])
    for one in body:
        if not isinstance(one, Function) or (private(one.name) and one.name != "__init__"):
            continue
        if one.name == "__init__":
            shown += f"- `{node.name}({arguments(one)})`\n"
        elif any(ast.unparse(decorator) == "property" for decorator in one.decorator_list):
            shown += f"- `{one.name}`: {inline(one)}\n"
        else:
            shown += f"- `{signature(one)}`: {inline(one)}\n"
    return shown


def assigned(node: ast.stmt) -> list[str]:
    """Return the names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def signature(node: Function) -> str:
    """Return the signature of a function or method; a context manager is shown as `with`."""
    kinds = {ast.unparse(decorator) for decorator in node.decorator_list}
    word = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    word += "with " if kinds & {"contextmanager", "asynccontextmanager"} else "def "
    return f"{word}{node.name}({arguments(node)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def arguments(node: Function) -> str:
    """Return the parameters without `self`."""
    return ast.unparse(node.args).removeprefix("self, ").removeprefix("self")


def text(node: ast.ClassDef | Function) -> str:
    """Return a docstring as paragraphs. Raises LookupError if it is missing."""
    found = ast.get_docstring(node)
    if not found:
        raise LookupError(f"{node.name} has no docstring")
    return found + "\n\n"


def inline(node: Function) -> str:
    """Return a docstring in one line."""
    return " ".join(text(node).split())


def private(name: str) -> bool:
    """Return whether a name is not part of the interface."""
    return name.startswith("_")


def tree(module: str) -> ast.Module:
    """Return a module's source as a tree."""
    place = SOURCES.parent.joinpath(*module.split("."))
    return ast.parse((place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text())


def public() -> Iterator[tuple[str, str]]:
    """Yield each public member as module and name."""
    for module, members in MODULES.items():
        for name in exported(module) if members is None else members:
            yield module, name


if __name__ == "__main__":
    PAGE.write_text(page())
