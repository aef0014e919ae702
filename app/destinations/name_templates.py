"""Fill `{topic}`, `{key}`, `{tag}` and `{group}` in the name of a routing key, a subject, a topic or a stream."""

import re
from collections.abc import Callable

from app.delivery import Delivery

NAMES = ("topic", "key", "tag", "group")

_replace = re.compile(r"\{(" + "|".join(NAMES) + r")\}").sub


def filled(template: str, delivery: Delivery, safe: Callable[[str, str], str] | None = None) -> str:
    """Return the template with the delivery's `placeholders` or the message's values; a missing one becomes empty.

    `safe` takes a placeholder's name and its value and returns a value that the broker's names allow. Other braces stay
    unchanged, also in the values.
    """
    if "{" not in template:
        return template

    def value(found: re.Match[str]) -> str:
        name = found[1]
        given = (delivery.placeholders or {}).get(name)
        if given is None:
            given = delivery.producer_group if name == "group" else getattr(delivery, name) or ""
        return given if safe is None else safe(name, given)

    return _replace(value, template)
