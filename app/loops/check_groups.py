"""What finished checks teach of their groups: how each URL does, how much a group can take, whether it wants a rest."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from app.asking import UrlResult
from app.loops.check_acts import Finished
from app.policy import Answered, Unanswered, held_s
from app.store.check_settles import Adjustment
from app.store.check_urls import CheckUrl

# A URL's good news is written at most this often; a change at once.
URL_NEWS_EVERY_S = 5.0
# Checks that time out together are one congestion, not many.
HALVE_EVERY_S = 1.0


@dataclass(slots=True)
class _Url:
    told: datetime
    up: bool


class Learning:
    """What one process has learnt and not written yet."""

    def __init__(self) -> None:
        self._urls: dict[tuple[str, str], _Url] = {}
        self._halved: dict[str, datetime] = {}

    def url_news(self, batch: Iterable[Finished], now: datetime) -> list[CheckUrl]:
        """Return what is worth writing of the URLs that a batch tried: changes, and the rest now and then."""
        last: dict[tuple[str, str], UrlResult] = {}
        for finished in batch:
            for tried in finished.tried:
                last[finished.check.claim.producer_group, tried.url] = tried
        news = []
        for (group, url), result in last.items():
            known, up = self._urls.get((group, url)), result.error is None
            if known and known.up == up and now < known.told + timedelta(seconds=URL_NEWS_EVERY_S):
                continue
            self._urls[group, url] = _Url(now, up)
            news.append(CheckUrl.of(group, url, result.error, result.at))
        return news

    def adjustments(self, batch: Sequence[Finished], now: datetime) -> list[Adjustment]:
        """Return how the windows of a batch's groups change, and which groups are held; nothing where all is well."""
        by_group: defaultdict[str, list[Finished]] = defaultdict(list)
        for finished in batch:
            if finished.check.group is not None and finished.brought is not None:
                by_group[finished.check.group.name].append(finished)
        found = (self._adjustment(name, checks, now) for name, checks in by_group.items())
        return [adjustment for adjustment in found if adjustment is not None]

    def _adjustment(self, name: str, checks: list[Finished], now: datetime) -> Adjustment | None:
        group = checks[-1].check.group
        assert group is not None
        brought = [finished.brought for finished in checks]
        hold = max(held_s(one) for one in brought if one is not None)
        congested = any(isinstance(one, Unanswered) and one.congested for one in brought)
        adjustment = Adjustment(name, False, 0, now + timedelta(seconds=hold) if hold else None)
        if congested:
            last = self._halved.get(name)
            if last is None or now >= last + timedelta(seconds=HALVE_EVERY_S):
                self._halved[name] = now
                adjustment = replace(adjustment, halve=True)
        elif group.check_window < group.check_max_in_flight and any(isinstance(one, Answered) for one in brought):
            adjustment = replace(adjustment, grow=1)
        wanted = adjustment.halve or adjustment.grow or adjustment.held_until
        return adjustment if wanted else None
