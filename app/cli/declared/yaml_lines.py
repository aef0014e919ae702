"""Read YAML 1.2 or JSON and remember the line of every value."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from app.cli.errors import WRONG_USAGE, Refusal

Path: TypeAlias = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain scalars as YAML 1.2 does: `no` and times are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 -- as the base has it


for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"^(?:{_pattern})$"), _first)


@dataclass
class Document:
    """A document's value, and the line of each part of it by its path."""

    source: str
    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)

    def place(self, path: Path) -> str:
        """Return `file:line` of a part, or of the nearest part around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.source}:{self.lines.get(path, 1)}"

    def refusal(self, path: Path, text: str) -> Refusal:
        """Return the error of a part of the document."""
        named = f" `{dotted(path)}`" if path else ""
        return Refusal(f"{self.place(path)}:{named} {text}", code=WRONG_USAGE)


def dotted(path: Path) -> str:
    """Write a path as `subscriptions.mailer.topics[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def documents(text: str, source: str) -> Iterator[Document]:
    """Yield the documents of a text. Raises Refusal with the line of a fault."""
    try:
        for node in yaml.compose_all(_without_tabs(text), _Loader):
            document = Document(source)
            document.value = _value(document, node, (), set())
            yield document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise Refusal(f"{source}:{line}: this is not YAML: {error.problem}.", code=WRONG_USAGE) from None
    except RecursionError:
        raise Refusal(f"{source}: this is nested too deeply.", code=WRONG_USAGE) from None
    except yaml.YAMLError as error:
        raise Refusal(f"{source}: this is not YAML: {error}.", code=WRONG_USAGE) from None


def _without_tabs(text: str) -> str:
    """Return JSON with blanks for tabs, which YAML does not take between values; JSON has none inside strings."""
    try:
        json.loads(text)
    except ValueError:
        return text
    return text.replace("\t", " ")


def _value(document: Document, node: yaml.Node, path: Path, open_nodes: set[int]) -> Any:
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(document, node, path)
    if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
        raise document.refusal(path, f"has the tag `{node.tag}`, which Halfnote does not read.")
    if id(node) in open_nodes:
        raise document.refusal(path, "contains itself.")
    inside = open_nodes | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        return [_value(document, one, (*path, n), inside) for n, one in enumerate(node.value)]
    return _mapping(document, node, path, inside)


def _mapping(document: Document, node: yaml.Node, path: Path, inside: set[int]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == f"{_TAG}merge":
            given = _value(document, value_node, path, inside)
            for one in given if isinstance(given, list) else [given]:
                if not isinstance(one, dict):
                    raise document.refusal(path, "merges (`<<`) something that is no mapping.")
                merged = one | merged
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise document.refusal(path, "has a key that is not a name.")
        # A name such as 1030 is text.
        key = str(key_node.value)
        if key in own:
            raise Refusal(f"{document.source}:{line}: `{dotted((*path, key))}` is given twice.", code=WRONG_USAGE)
        document.lines[(*path, key)] = line
        own[key] = _value(document, value_node, (*path, key), inside)
    return merged | own


def _scalar(document: Document, node: yaml.ScalarNode, path: Path) -> Any:
    kind, text = node.tag.removeprefix(_TAG), str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind in ("int", "float"):
        return int(text) if kind == "int" else float(text)
    if kind in ("str", "merge"):
        # JSON writes a character beyond the first 65,536 as two escapes.
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise document.refusal(path, "has half a character (a lone surrogate), which is not Unicode.") from None
    raise document.refusal(path, f"has the tag `{node.tag}`, which Halfnote does not read.")
