"""Topic patterns: the rule itself, and that the SQL condition is the same rule."""

import json

import pytest

from app.database.connection import Connection
from app.topic_patterns import TopicPatterns, match_sql
from tests.support.examples import examples
from tests.support.topic_cases import topic_cases

BY_COLUMN = f"""
select array_agg({match_sql("c.topic", "c.patterns")} order by c.n)
from jsonb_to_recordset($1::jsonb) as c(n int, topic text, patterns text[])
"""
BY_PARAMETER = f"select array_agg({match_sql('t.topic', '$2::text[]')} order by n) from unnest($1::text[]) " + (
    "with ordinality as t(topic, n)"
)


@pytest.mark.parametrize(
    ("pattern", "matched", "others"),
    [
        ("order", ["order"], ["orders", "orde", "Order", "x.order", ""]),
        ("order.*", ["order.", "order.paid", "order.*"], ["order", "orders"]),
        ("*", ["order", "halfnote", "*"], ["halfnote.", "halfnote.finding"]),
        ("half*", ["half", "halfnote", "halfway"], ["halfnote.", "halfnote.finding"]),
        ("halfnote*", ["halfnote", "halfnotes"], ["halfnote.", "halfnote.finding"]),
        ("halfnote.*", ["halfnote.", "halfnote.finding"], ["halfnote", "order"]),
        ("halfnote.f*", ["halfnote.f", "halfnote.finding"], ["halfnote.", "halfnote.delivery.dead"]),
        ("halfnote.finding", ["halfnote.finding"], ["halfnote.findings"]),
        ("o_d%", ["o_d%"], ["order"]),
    ],
)
async def test_a_pattern_matches_names_and_reserved_ones_only_if_it_is_reserved(
    db: Connection, pattern: str, matched: list[str], others: list[str]
) -> None:
    patterns = TopicPatterns([pattern])
    expected = [True] * len(matched) + [False] * len(others)
    assert [patterns.match(topic) for topic in (*matched, *others)] == expected
    assert await db.fetchval(BY_PARAMETER, [*matched, *others], [pattern]) == expected
    # A set matches what any of its patterns matches; an empty set matches nothing.
    assert TopicPatterns([pattern, "other"]).match("other")
    assert not TopicPatterns([]).match_any([*matched, *others])


async def test_python_and_sql_match_the_same(db: Connection) -> None:
    found = topic_cases(examples(5000))
    expected = [TopicPatterns(patterns).match(topic) for patterns, topic in found]
    assert len(found) // 5 < sum(expected) < len(found) * 4 // 5
    rows = [{"n": n, "topic": topic, "patterns": patterns} for n, (patterns, topic) in enumerate(found)]
    answers = await db.fetchval(BY_COLUMN, json.dumps(rows))
    assert [case for case, in_python, in_sql in zip(found, expected, answers, strict=True) if in_python != in_sql] == []
    topics = [topic for _, topic in found]
    for patterns in (["*"], ["halfnote.*", "o*"], ["order", "half*", "halfnote.order"], []):
        one = TopicPatterns(patterns)
        answers = await db.fetchval(BY_PARAMETER, topics, patterns)
        assert [topic for topic, in_sql in zip(topics, answers, strict=True) if one.match(topic) != in_sql] == []


def test_patterns_cover_a_pattern_if_they_match_all_that_it_matches() -> None:
    for patterns, pattern, covered in (
        (["*"], "order", True),
        (["*"], "order.*", True),
        (["*"], "halfnote.*", False),
        (["*"], "halfnote.finding", False),
        (["half*"], "halfnote.*", False),
        (["halfnote.*"], "halfnote.f*", True),
        (["halfnote.f*"], "halfnote.*", False),
        (["order.*"], "order*", False),
        (["order"], "order*", False),
        ([], "order", False),
    ):
        assert TopicPatterns(patterns).cover(pattern) == covered, (patterns, pattern)


def test_equal_patterns_are_equal_in_any_order() -> None:
    assert TopicPatterns(["b", "a*", "b"]) == TopicPatterns(["a*", "b"])
    assert len({TopicPatterns(["b", "a*"]), TopicPatterns(["a*", "b"]), TopicPatterns(["b"])}) == 2
    assert TopicPatterns(["b"]) != ("b",)
    assert repr(TopicPatterns(["b", "a*"])) == "TopicPatterns(['a*', 'b'])"
