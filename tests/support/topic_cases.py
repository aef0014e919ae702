"""Generated pairs of topic patterns and a topic, for tests that compare the readers of topic patterns."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# What the rule depends on: the reserved prefix, whole and in part; `*` inside a name; characters that LIKE and
# regular expressions treat in a special way; and characters of two, three and four bytes.
PARTS = ["halfnote.", "halfnote", "half", "order", "o", ".", "*", "%", "_", "\\", "'", '"', "ä", "…", "😀", "H", " "]
names = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map("".join)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], str]:
    """Draw patterns, and a topic that often has the prefix of one of them."""
    patterns = draw(st.lists(names | names.map(lambda name: f"{name}*") | st.just("*"), max_size=3))
    prefixes = [one.removesuffix("*") for one in patterns]
    similar = st.sampled_from(prefixes).flatmap(lambda prefix: st.just(prefix) | names.map(lambda end: prefix + end))
    topic = draw(similar | names if patterns else names)
    return patterns, topic or "order"


def topic_cases(count: int) -> list[tuple[list[str], str]]:
    """Return `count` generated cases or a few more: patterns, and a topic of at least one character."""
    found: list[tuple[list[str], str]] = []

    @settings(max_examples=count // 50, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(st.lists(cases(), min_size=50, max_size=60))
    def collect(some: list[tuple[list[str], str]]) -> None:
        found.extend(some)

    collect()
    return found
