"""A routing key, a subject, a topic or a stream for one message: `{topic}`, `{key}`, `{tag}`, `{group}` in its name."""

import re
from collections.abc import Callable

from app.destinations.base import Delivery

NAMES = ("topic", "key", "tag", "group")

_replace = re.compile(r"\{(" + "|".join(NAMES) + r")\}").sub


def filled(template: str, delivery: Delivery, safe: Callable[[str, str], str] | None = None) -> str:
    """Return the template with the message's values in place; a message without a key or a tag leaves it empty.

    `safe` makes of each value, given with its placeholder's name, one that the broker's names allow. All else in
    braces stays as it is, also in the values themselves.
    """
    if "{" not in template:
        return template

    def value(found: re.Match[str]) -> str:
        name = found[1]
        given = delivery.producer_group if name == "group" else getattr(delivery, name) or ""
        return given if safe is None else safe(name, given)

    return _replace(value, template)
