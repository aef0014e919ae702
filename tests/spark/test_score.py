"""The score of a day: each kind lowers one part, and only a part without findings has 100."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from spark.score import PART_OF, PARTS, score
from spark.transforms.rules import RULES

ROOT = Path(__file__).parent.parent.parent
COUNTS = st.dictionaries(st.sampled_from(sorted(PART_OF)), st.integers(1, 10**9))


def test_every_kind_lowers_one_part_and_is_in_the_documentation() -> None:
    assert set(PART_OF) == {rule.kind for rule in RULES}
    assert set(PART_OF.values()) == set(PARTS)
    lines = (ROOT / "docs/reconciliation.md").read_text().splitlines()
    for part in PARTS:
        [line] = [line for line in lines if line.startswith(f"| {part} |")]
        assert line.endswith(f"| {', '.join(f'`{kind}`' for kind in PART_OF if PART_OF[kind] == part)} |")


def test_a_part_is_the_share_without_findings_rounded_down() -> None:
    assert score(1000, {}) == dict.fromkeys(PARTS, 100.0)
    found = {"parked": 1, "delivery_late": 2, "content_differs": 1000, "fewer_than_usual": 1000}
    assert score(1000, found) == {"complete": 50.0, "agreed": 0.0, "timely": 99.7, "orderly": 100.0}
    assert score(30_000_000, {"parked": 1})["timely"] == 99.99
    # A day without rows, and one that should have some.
    assert score(0, {}) == dict.fromkeys(PARTS)
    assert score(0, {"fewer_than_usual": 10_000})["complete"] == 0.0


@given(st.integers(0, 10**9), COUNTS)
def test_only_a_part_without_findings_has_all(rows: int, affected: dict[str, int]) -> None:
    parts = score(rows, affected)
    lowered = {PART_OF[kind] for kind in affected}
    for part in PARTS:
        value = parts[part]
        if part in lowered:
            assert value is not None
            assert 0 <= value < 100
        else:
            assert value == (100 if rows else None)
