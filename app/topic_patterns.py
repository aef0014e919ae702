"""PURE: which topics a pattern matches: the one rule in Python, and the same rule as an SQL condition.

A topic pattern is a topic's name, or the beginning of names with one `*` at the end, such as `order.*`. Topics that
begin with `halfnote.` are reserved for Halfnote's own messages. Only a pattern that itself begins with `halfnote.`
matches them: neither `*` nor `half*` does.
"""

from collections.abc import Collection, Iterable

RESERVED = "halfnote."


def is_reserved(name: str) -> bool:
    """Return whether a topic is reserved, or a pattern matches reserved topics alone."""
    return name.startswith(RESERVED)


class TopicPatterns:
    """A set of topic patterns; equal if the patterns are. It matches what at least one of them matches."""

    __slots__ = ("_beginnings", "_names", "_reserved_beginnings", "patterns")

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(sorted(set(patterns)))
        self._names = frozenset(one for one in self.patterns if not one.endswith("*"))
        self._beginnings = tuple(one[:-1] for one in self.patterns if one.endswith("*"))
        self._reserved_beginnings = tuple(filter(is_reserved, self._beginnings))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopicPatterns) and self.patterns == other.patterns

    def __hash__(self) -> int:
        return hash(self.patterns)

    def __repr__(self) -> str:
        return f"TopicPatterns({list(self.patterns)})"

    def match(self, topic: str) -> bool:
        """Return whether a topic is matched."""
        return topic in self._names or topic.startswith(
            self._reserved_beginnings if topic.startswith(RESERVED) else self._beginnings
        )

    def match_any(self, topics: Collection[str]) -> bool:
        """Return whether at least one of the topics is matched."""
        return any(map(self.match, topics))

    def cover(self, pattern: str) -> bool:
        """Return whether every topic that a pattern matches is matched."""
        if not pattern.endswith("*"):
            return self.match(pattern)
        beginning = pattern[:-1]
        return beginning.startswith(self._reserved_beginnings if is_reserved(pattern) else self._beginnings)


def reserved_sql(name: str) -> str:
    """Return the SQL condition that a name (an expression of type text) is reserved, as in `is_reserved`."""
    return f"{name} ^@ '{RESERVED}'"


def match_sql(topic: str, patterns: str) -> str:
    """Return the SQL condition that patterns match a topic, as in `TopicPatterns.match`.

    `topic` is an expression of type text, `patterns` one of type text[], such as `$2::text[]`; neither is null. If
    `patterns` is a parameter, the arrays of beginnings are computed once for the statement (InitPlans) and not for each
    row. A topic that equals a pattern is matched also where that pattern ends in `*`.
    """
    beginnings = f"""select left(p.pattern, -1) from unnest({patterns}) as p(pattern)
        where right(p.pattern, 1) = '*'"""  # noqa: S608 -- expressions of ours
    reserved_beginnings = f"{beginnings} and {reserved_sql('p.pattern')}"
    return f"""({topic} = any({patterns}) or case when {reserved_sql(topic)}
      then {topic} ^@ any(array({reserved_beginnings}))
      else {topic} ^@ any(array({beginnings})) end)"""
