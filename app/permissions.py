"""Callers and their rights: roles, scopes and keys. Pure: no I/O, no clock.

A scope is a list of names and of prefixes that end in `*`, such as `team.*`, which serves as a namespace.
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
from app.topic_patterns import TopicPatterns

PREFIX = "hn_"
KEY_BYTES = 32
# The characters that 256 bits take in this alphabet. A double click selects a whole key.
KEY_CHARACTERS = 43
# The part of a key that lists show, so that people can distinguish keys: 36 of its 256 bits.
SHOWN_CHARACTERS = len(PREFIX) + 6
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# People may choose a longer key (HALFNOTE_ADMIN_KEY): 64 hexadecimal digits are 256 bits as well.
_is_key = re.compile(rf"{PREFIX}[0-9A-Za-z]{{{KEY_CHARACTERS},128}}").fullmatch


class Role(StrEnum):
    """The role of a key."""

    PRODUCER = "producer"
    SUBSCRIBER = "subscriber"
    OPERATOR = "operator"
    ADMIN = "admin"
    METRICS = "metrics"
    VIEWER = "viewer"


class KeyScope:
    """A set of names and prefixes of names. Topics match by the rule of topic patterns."""

    __slots__ = ("_exact", "_prefixes", "_whole", "patterns", "topic_patterns")

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._exact = frozenset(one for one in self.patterns if not one.endswith("*"))
        self._prefixes = tuple(one[:-1] for one in self.patterns if one.endswith("*"))
        self._whole = "" in self._prefixes
        self.topic_patterns = TopicPatterns(self.patterns)

    def takes(self, name: str) -> bool:
        """Return whether the name of a group or subscription is in the scope."""
        return self._whole or name in self._exact or name.startswith(self._prefixes)

    def takes_topic(self, topic: str) -> bool:
        """Return whether a topic is in the scope; a reserved topic only by a reserved pattern."""
        return self.topic_patterns.match(topic)

    def covers_topics(self, pattern: str) -> bool:
        """Return whether every topic that a subscription's pattern matches is in the scope."""
        return self.topic_patterns.cover(pattern)

    @property
    def within(self) -> "Within":
        """Names and prefixes in the form that statements take."""
        return EVERYTHING if self._whole else (sorted(self._exact), list(self._prefixes))


Within: TypeAlias = tuple[list[str] | None, list[str]]
EVERYTHING: Within = (None, [])
ALL, NONE = KeyScope(["*"]), KeyScope([])


# Not frozen and compared by identity, because every request uses one.
@dataclass(slots=True, eq=False)
class Caller:
    """The caller of a request. `role` None: auth is off, or the route is open and has no key (`known` False).

    `expires_at` is a Unix time. `gone` says why a key that once was valid no longer is.
    `reads_bodies`: answers have the bodies of messages. `subject`: the issuer's id of a person who signed in by OpenID
    Connect and has no key.
    """

    role: Role | None
    known: bool = True
    key_id: int | None = None
    name: str | None = None
    groups: KeyScope = ALL
    topics: KeyScope = ALL
    subscriptions: KeyScope = ALL
    digest: bytes = b""
    expires_at: float = inf
    gone: str | None = None
    rate_per_s: float | None = None
    reads_bodies: bool = True
    subject: str | None = None

    def must_be(self, roles: frozenset[Role]) -> None:
        """Raise Forbidden unless the key has one of these roles."""
        if self.role not in roles and not (self.role is None and self.known):
            whose = f"This key is {_one(self.role)}'s" if self.subject is None else f"You are {_one(self.role)}"
            raise Forbidden(
                f"{whose}; this call is for {_either(roles)}.",
                role=self.role,
                missing={"role": sorted(roles)},
            )

    def must_have_group(self, group: str) -> None:
        """Raise Forbidden unless the producer group is in the key's scope."""
        if not self.groups.takes(group):
            raise self._lacks("producer group", "groups", group)

    def has_topic(self, topic: str) -> bool:
        """Return whether the topic is in the key's scope. Without a scope it also has those that `*` leaves out."""
        return self.topics is ALL or self.topics.takes_topic(topic)

    def must_have_topic(self, topic: str) -> None:
        """Raise Forbidden unless the topic is in the key's scope."""
        if not self.has_topic(topic):
            raise self._lacks("topic", "topics", topic)

    def must_cover_topics(self, patterns: Iterable[str]) -> None:
        """Raise Forbidden unless every topic that these patterns match is in the key's scope."""
        for pattern in patterns:
            if not self.covers_topics((pattern,)):
                raise self._lacks("topic", "topics", pattern)

    def covers_topics(self, patterns: Iterable[str]) -> bool:
        """Return whether every topic that these patterns match is in the key's scope."""
        # A key without a scope also has the topics that `*` leaves out.
        return self.topics is ALL or all(self.topics.covers_topics(pattern) for pattern in patterns)

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


# AUTH_OFF: any caller while auth is off, with all rights. ANONYMOUS: a caller of an open route without a key.
AUTH_OFF = Caller(None)
ANONYMOUS = Caller(None, known=False, groups=NONE, topics=NONE, subscriptions=NONE)


def _either(roles: frozenset[Role]) -> str:
    return " or ".join(map(_one, sorted(roles))) or "no role"


def _one(role: Role | None) -> str:
    return "unknown caller" if role is None else f"{'an' if role[0] in 'ao' else 'a'} {role}"


def new_key() -> str:
    """Return a new key of 256 bits."""
    number = int.from_bytes(secrets.token_bytes(KEY_BYTES), "big")
    digits = []
    for _ in range(KEY_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return PREFIX + "".join(digits)


def is_key(text: str) -> bool:
    """Return whether a text has the form of a key."""
    return _is_key(text) is not None


def digest_of(key: str) -> bytes:
    """Return the stored digest of a key. A key has 256 random bits, so SHA-256 is slow enough."""
    return sha256(key.encode()).digest()
