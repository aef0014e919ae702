"""Filter expressions of RocketMQ's consumers as the filters of a Halfnote subscription.

Tags: `*`, or `a || b`. SQL92: what a subscription can do, which is `and` of `name = 'text'`, and for tags also `in`.
"""

import re
from typing import Any

from app.rocketmq.headers import is_header
from app.rocketmq.protocol.definition_pb2 import Code, FilterExpression, FilterType
from app.rocketmq.refusals import CallRefused

# A subscription has at most 100 tags of 255 characters, so a longer expression says nothing that one can do.
EXPRESSION_MAX = 32 * 1024
# Characters of an expression that an error repeats.
_SHOWN = 200
_TEXT = r"'(?:[^']|'')*'"
# Each character is read once, however many blanks and quotes there are: an expression is read in the loop that serves
# all clients.
_tokens = re.compile(rf"{_TEXT}|\s+|[^\s']+|'").findall
_equal = re.compile(rf"\(?\s*([A-Za-z_][\w.-]*)\s*=\s*({_TEXT})\s*\)?").fullmatch
_among = re.compile(rf"\(?\s*tags\s+in\s*\(\s*({_TEXT}(?:\s*,\s*{_TEXT})*)\s*\)\s*\)?", re.IGNORECASE).fullmatch
_texts = re.compile(_TEXT).findall

Filters = dict[str, Any] | None


def filters_of(expression: FilterExpression) -> Filters:
    """Return the `filters` of a subscription; None: every message. Raises CallRefused (ILLEGAL_FILTER_EXPRESSION)."""
    if len(expression.expression) > EXPRESSION_MAX:
        raise CallRefused(
            Code.ILLEGAL_FILTER_EXPRESSION, f"A filter expression has at most {EXPRESSION_MAX:,} characters."
        )
    text = expression.expression.strip()
    if expression.type == FilterType.SQL:
        return _of_sql(text)
    if text in ("", "*"):
        return None
    tags = [tag.strip() for tag in text.split("||")]
    if not all(tags) or any("|" in tag for tag in tags):
        raise CallRefused(
            Code.ILLEGAL_FILTER_EXPRESSION, f"`{text[:_SHOWN]}` is not a list of tags like `created || paid`."
        )
    return {"tags": sorted(set(tags))}


def _of_sql(text: str) -> Filters:
    if re.fullmatch(r"(?i)\s*(true|1\s*=\s*1)?\s*", text):
        return None
    tags: set[str] | None = None
    headers: dict[str, str] = {}
    for part in _conjuncts(text):
        named = _equal(part)
        among = _among(part)
        if among is not None or (named is not None and named[1].upper() == "TAGS"):
            wanted = {_plain(one) for one in _texts(part)}
            tags = wanted if tags is None else tags & wanted
        elif named is not None and is_header(named[1]) and headers.get(named[1], _plain(named[2])) == _plain(named[2]):
            headers[named[1]] = _plain(named[2])
        else:
            raise _unsupported(part)
    if tags is not None and not tags:
        raise _unsupported(text)
    return {
        **({} if tags is None else {"tags": sorted(tags)}),
        **({"headers": dict(sorted(headers.items()))} if headers else {}),
    }


def _conjuncts(text: str) -> list[str]:
    """Return what stands between the `and` that have blanks on both sides and are in no quoted text."""
    tokens = _tokens(text)
    parts, start = [], 0
    for at in range(1, len(tokens) - 1):
        if tokens[at].lower() == "and" and tokens[at - 1].isspace() and tokens[at + 1].isspace():
            parts.append("".join(tokens[start:at]).strip())
            start = at + 1
    return [*parts, "".join(tokens[start:]).strip()]


def _plain(quoted: str) -> str:
    return quoted[1:-1].replace("''", "'")


def _unsupported(part: str) -> CallRefused:
    return CallRefused(
        Code.ILLEGAL_FILTER_EXPRESSION,
        f"Halfnote cannot filter by `{part.strip()[:_SHOWN]}`. It can compare: `name = 'text'`, `TAGS = 'a'`, "
        "`TAGS in ('a', 'b')`, joined by `and`.",
    )
