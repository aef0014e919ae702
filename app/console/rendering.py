"""Renders the console's templates: always escaped, with times, durations and numbers in one form each."""

import shlex
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from app.console.static_files import url_of
from app.verdicts import State

# A page names the same things many times.
_KEPT = 4096
_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))

# The words of states in pages, and the classes of their colors.
WORDS = {
    State.IN_DOUBT.value: "in doubt",
    State.ROLLED_BACK.value: "rolled back",
    "in_retry": "in retry",
    # Of deliveries (DeliveryReason).
    "no_subscription": "no subscription",
    "no_topic_match": "other topic",
    "filtered_by_tag": "other tag",
    "filtered_by_header": "other header",
    "subscription_newer": "begins later",
    "changed_since": "begins later",
    "no_record": "no record",
    "no_worker": "no worker",
    "breaker_open": "breaker open",
    "behind_key": "behind its key",
    "due_later": "due later",
    "in_flight": "being sent",
    "not_yet_sent": "waiting",
}
TONES = {
    "half": "wait",
    "in_doubt": "warn",
    "parked": "bad",
    "committed": "good",
    "rolled_back": "mute",
    "delivered": "good",
    "waiting": "wait",
    "in_retry": "warn",
    "dead": "bad",
    "dropped": "mute",
    "active": "good",
    "paused": "warn",
    "disabled": "bad",
    "open": "bad",
    "closed": "good",
    "proved": "good",
    "findings": "warn",
    "failed": "bad",
    "resolved": "good",
    "final": "good",
    "provisional": "wait",
    "valid": "good",
    "expired": "mute",
    "revoked": "mute",
    "running": "wait",
    "done": "good",
    "cancelled": "mute",
    "no_subscription": "warn",
    "no_record": "bad",
    "no_worker": "bad",
    "breaker_open": "bad",
    "behind_key": "warn",
    "retrying": "warn",
    "due_later": "wait",
    "in_flight": "wait",
    "not_yet_sent": "wait",
}


def render(template: str, **values: Any) -> str:
    """Return a page as HTML."""
    return _environment.get_template(template).render(**values)


def duration(seconds: float) -> str:
    """Return a duration with its unit: `340 ms`, `4.2 s`, `12 min`, `3 h`, `2 d`."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))} ms"
    for size, unit in _UNITS:
        if seconds >= size:
            number = seconds / size
            return f"{number:.1f} {unit}" if number < 10 and unit != "min" else f"{number:.0f} {unit}"
    return "0 s"


def when(at: datetime | None, now: datetime) -> Markup:
    """Return a time as its distance from now, with the exact time on hover."""
    if at is None:
        return Markup('<span class="none">&ndash;</span>')
    apart_s = (now - at).total_seconds()
    text = f"{duration(apart_s)} ago" if apart_s >= 0 else f"in {duration(-apart_s)}"
    # A page has up to a thousand of them. Nothing here needs an escape, and Markup.format takes several times as long.
    return Markup(f'<time datetime="{at.isoformat()}" title="{exact(at)}">{text}</time>')  # noqa: S704


def exact(at: datetime) -> str:
    """Return a time in UTC to the millisecond."""
    return at.astimezone(UTC).isoformat(" ", "milliseconds").replace("+00:00", " UTC")


def number(value: float) -> str:
    """Return a number with separators for thousands."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"


def rate(per_s: float) -> str:
    """Return a rate as a number: three digits below 1 and one after that, so that a small one is not 0."""
    return "0" if per_s == 0 else f"{per_s:.3g}" if per_s < 1 else f"{per_s:,.1f}"


def size(count: int) -> str:
    """Return a number of bytes with its unit."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


@lru_cache(_KEPT)
def state(value: str) -> Markup:
    """Return a state with its color."""
    text = WORDS.get(value, value)
    return Markup(f'<span class="state {TONES.get(value, "mute")}">{escape(text)}</span>')  # noqa: S704


def command(*words: str, **options: Any) -> str:
    """Return a command of the command line for what a page shows. Of the words, only the last can be anyone's text."""
    given = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in options.items() if value]
    if words[-1].startswith("-"):
        # Otherwise it would be an option.
        return " ".join(["halfnote", *map(shlex.quote, words[:-1]), *given, "--", shlex.quote(words[-1])])
    return " ".join(["halfnote", *map(shlex.quote, words), *given])


@lru_cache(_KEPT, typed=True)
def link(*parts: Any, **query: Any) -> str:
    """Return the URL of a page: its parts as path segments, and a query without empty fields."""
    path = "/".join(["/console", *(quote(str(part), safe="") for part in parts)])
    wanted = {name: str(value) for name, value in query.items() if value is not None}
    return path + (f"?{urlencode(wanted)}" if wanted else "")


def short(value: object) -> str:
    """Return the end of an id: ids of one time begin alike."""
    text = str(value)
    return text if len(text) <= 14 else f"…{text[-12:]}"


def said(sentence: str) -> Markup:
    """Return a sentence of the API with the names that it has in backticks as code."""
    parts = sentence.split("`")
    # An odd number of backticks: one is part of a name or of an error, so nothing can be told apart.
    if len(parts) % 2 == 0:
        return escape(sentence)
    escaped = [str(escape(part)) for part in parts]
    escaped[1::2] = [f"<code>{part}</code>" for part in escaped[1::2]]
    return Markup("".join(escaped))  # noqa: S704


def rest(detail: dict[str, Any]) -> dict[str, Any]:
    """Return the detail of an act without its reason, which has a column of its own."""
    return {name: value for name, value in detail.items() if name != "reason"}


def json(value: Any) -> str:
    """Return a value as JSON."""
    return msgspec.json.encode(value).decode()


_environment = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)
_environment.filters.update(
    duration=duration,
    when=when,
    exact=exact,
    number=number,
    rate=rate,
    size=size,
    state=state,
    short=short,
    rest=rest,
    said=said,
    json=json,
)
_environment.globals.update(url_of=url_of, link=link, command=command)
