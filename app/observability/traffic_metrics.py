"""Counts by producer group, topic and API key. Each label has at most `HALFNOTE_METRICS_VALUES_MAX` values."""

from collections.abc import Iterable
from dataclasses import dataclass

from app.observability.label_limits import OTHER, LimitedLabel
from app.observability.metric_families import Families
from app.observability.tallies import Tallies, Tally
from app.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class GroupSeries:
    """The series of one producer group."""

    halves: Tally
    commits: Tally
    rollbacks: Tally


class TrafficMetrics:
    """What each producer group, topic and API key does."""

    def __init__(self, families: Families, tallies: Tallies, values_max: int) -> None:
        halves = families.counter("group_halves", "Half messages stored, by producer group", "producer_group")
        verdicts = families.counter(
            "group_verdicts", "Verdicts recorded, by producer group", "producer_group", "verdict"
        )
        messages = families.counter("topic_messages", "Messages committed, by topic", "topic")
        self._refusals = families.counter(
            "key_refusals", "Requests refused with 429, by API key and limit", "key", "key_id", "limit"
        )

        def of_group(group: str) -> GroupSeries:
            commits, rollbacks = (
                tallies.of(verdicts.labels(group, one.word)) for one in (Verdict.COMMIT, Verdict.ROLLBACK)
            )
            return GroupSeries(tallies.of(halves.labels(group)), commits, rollbacks)

        def of_topic(topic: str) -> Tally:
            return tallies.of(messages.labels(topic))

        self.groups = LimitedLabel(values_max, of_group, lambda: of_group(OTHER))
        self.topics = LimitedLabel(values_max, of_topic, lambda: of_topic(OTHER))
        self._keys: LimitedLabel[tuple[str, str], tuple[str, str]] = LimitedLabel(
            values_max, lambda key: key, lambda: (OTHER, OTHER)
        )

    def learn(self, groups: Iterable[str], topics: Iterable[str]) -> None:
        """Show 0 for these groups and topics, oldest first, so that their series do not depend on what comes first."""
        self.groups.learn(groups)
        self.topics.learn(topics)

    def count_halves(self, group: str, count: int = 1) -> None:
        """Count halves of a group that were stored. The caller publishes the tallies."""
        self.groups.of(group).halves.count += count

    def count_verdicts(self, group: str, verdict: Verdict, count: int = 1) -> None:
        """Count recorded verdicts of a group. The caller publishes the tallies."""
        series = self.groups.of(group)
        (series.commits if verdict == Verdict.COMMIT else series.rollbacks).count += count

    def count_messages(self, topic: str, count: int = 1) -> None:
        """Count messages of a topic that were committed. The caller publishes the tallies."""
        self.topics.of(topic).count += count

    def refused(self, name: str, key_id: int, limit: str) -> None:
        """Count a request that a key's limit refused: `rate` or `in_flight`."""
        self._refusals.labels(*self._keys.of((name, str(key_id))), limit).inc()
