"""Who calls and what they may do: roles, scopes and keys. Pure: no input and output, no clock.

A scope is a list of names and of beginnings with one `*` at the end, such as `team.*`, which serves as a namespace.
"""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from math import inf
from typing import TypeAlias

from app.errors import Forbidden

PREFIX = "hn_"
KEY_BYTES = 32
# What 256 bits take in this alphabet, in which a double click takes the whole key.
KEY_CHARACTERS = 43
# How much of a key is shown, so that people can tell keys apart: 36 of its 256 bits.
SHOWN_CHARACTERS = len(PREFIX) + 6
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Longer ones are taken where people choose a key (HALFNOTE_ADMIN_KEY): 64 hexadecimal digits are 256 bits as well.
_is_key = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{KEY_CHARACTERS},128}}").fullmatch

# Halfnote's own topics, which `*` does not take.
RESERVED = "halfnote."


class Role(StrEnum):
    """What a key is for."""

    PRODUCER = "producer"
    SUBSCRIBER = "subscriber"
    OPERATOR = "operator"
    ADMIN = "admin"
    METRICS = "metrics"


class Scope:
    """Names and beginnings of names; tells what it takes."""

    __slots__ = ("_exact", "_prefixes", "_whole", "patterns")

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._exact = frozenset(one for one in self.patterns if not one.endswith("*"))
        self._prefixes = tuple(one[:-1] for one in self.patterns if one.endswith("*"))
        self._whole = "" in self._prefixes

    def takes(self, name: str) -> bool:
        """Tell whether a group's or subscription's name is in it."""
        return self._whole or name in self._exact or name.startswith(self._prefixes)

    def takes_topic(self, topic: str) -> bool:
        """Tell whether a topic is in it; Halfnote's own only if a pattern itself begins so."""
        if topic.startswith(RESERVED):
            return topic in self._exact or any(
                one.startswith(RESERVED) and topic.startswith(one) for one in self._prefixes
            )
        return self.takes(topic)

    def covers_topics(self, pattern: str) -> bool:
        """Tell whether every topic that a subscription's pattern takes is in it."""
        if not pattern.endswith("*"):
            return self.takes_topic(pattern)
        beginning = pattern[:-1]
        own = beginning.startswith(RESERVED)
        return any(beginning.startswith(one) and (one.startswith(RESERVED) or not own) for one in self._prefixes)

    @property
    def within(self) -> "Within":
        """Names and beginnings, as statements take them."""
        return EVERYTHING if self._whole else self.topics_within

    @property
    def topics_within(self) -> tuple[list[str], list[str]]:
        """Topics and beginnings of topics, as statements take them that leave out Halfnote's own by themselves."""
        return sorted(self._exact), list(self._prefixes)


Within: TypeAlias = tuple[list[str] | None, list[str]]
EVERYTHING: Within = (None, [])
ALL, NONE = Scope(["*"]), Scope([])


# Not frozen and compared by identity: one is looked at for every request.
@dataclass(slots=True, eq=False)
class Caller:
    """Who asks. `role` None: auth is off, or the route is open and nobody said who asks (`known` False).

    `expires_at` is a Unix time. `gone` says why a key that once was valid is none any more.
    """

    role: Role | None
    known: bool = True
    key_id: int | None = None
    name: str | None = None
    groups: Scope = ALL
    topics: Scope = ALL
    subscriptions: Scope = ALL
    digest: bytes = b""
    expires_at: float = inf
    gone: str | None = None
    rate_per_s: float | None = None

    def must_be(self, roles: frozenset[Role]) -> None:
        """Raise Forbidden unless the key has one of these roles."""
        if self.role not in roles and not (self.role is None and self.known):
            raise Forbidden(
                f"This key is {_one(self.role)}'s; this call is for {_either(roles)}.",
                role=self.role,
                missing={"role": sorted(roles)},
            )

    def must_have_group(self, group: str) -> None:
        """Raise Forbidden unless the producer group is in the key's scope."""
        if not self.groups.takes(group):
            raise self._lacks("producer group", "groups", group)

    def has_topic(self, topic: str) -> bool:
        """Tell whether the topic is in the key's scope; those without a scope also have what `*` does not take."""
        return self.topics is ALL or self.topics.takes_topic(topic)

    def must_have_topic(self, topic: str) -> None:
        """Raise Forbidden unless the topic is in the key's scope."""
        if not self.has_topic(topic):
            raise self._lacks("topic", "topics", topic)

    def must_cover_topics(self, patterns: Iterable[str]) -> None:
        """Raise Forbidden unless everything that these patterns take is in the key's scope."""
        for pattern in patterns:
            # Those without a scope may also have what `*` does not take.
            if self.topics is not ALL and not self.topics.covers_topics(pattern):
                raise self._lacks("topic", "topics", pattern)

    def must_have_subscription(self, name: str) -> None:
        """Raise Forbidden unless the subscription is in the key's scope."""
        if not self.subscriptions.takes(name):
            raise self._lacks("subscription", "subscriptions", name)

    def _lacks(self, what: str, scope: str, name: str) -> Forbidden:
        return Forbidden(
            f"This key does not reach the {what} `{name}`; an admin can make one whose `{scope}` name it.",
            role=self.role,
            missing={scope: name},
        )


# With auth off everybody may do everything; whoever calls an open route without a key is nobody.
ANYBODY = Caller(None)
NOBODY = Caller(None, known=False, groups=NONE, topics=NONE, subscriptions=NONE)


def _either(roles: frozenset[Role]) -> str:
    return " or ".join(map(_one, sorted(roles))) or "nobody"


def _one(role: Role | None) -> str:
    return "nobody" if role is None else f"{'an' if role[0] in 'ao' else 'a'} {role}"


def new_key() -> str:
    """Return a new key of 256 bits."""
    number = int.from_bytes(secrets.token_bytes(KEY_BYTES), "big")
    digits = []
    for _ in range(KEY_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return PREFIX + "".join(digits)


def is_key(text: str) -> bool:
    """Tell whether a text has a key's form."""
    return _is_key(text) is not None


def digest_of(key: str) -> bytes:
    """Return what is stored of a key. It has 256 random bits, so nothing slower than SHA-256 is needed."""
    return sha256(key.encode()).digest()
