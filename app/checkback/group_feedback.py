"""Derive from finished checks the state of each URL, each group's check window, and pauses that groups ask for."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from app.checkback.check import FinishedCheck
from app.checkback.check_requests import UrlResult
from app.policy.check_schedule import Answered, CheckResult, Unanswered, held_s
from app.store.checkback.check_urls import CheckUrl
from app.store.checkback.claims import AskedGroup
from app.store.checkback.results import Adjustment

# An unchanged URL is written at most this often; a change at once.
URL_REFRESH_EVERY_S = 5.0
# Checks that time out together halve the window once.
HALVE_EVERY_S = 1.0


@dataclass(slots=True)
class _Url:
    written_at: datetime
    up: bool


class GroupFeedback:
    """The state of one process: when each URL was last written, and each window last halved."""

    def __init__(self) -> None:
        self._urls: dict[tuple[str, str], _Url] = {}
        self._halved: dict[str, datetime] = {}

    def url_changes(self, batch: Iterable[FinishedCheck], now: datetime) -> list[CheckUrl]:
        """Return the URLs of a batch to write: those that changed, and those not written for URL_REFRESH_EVERY_S."""
        last: dict[tuple[str, str], UrlResult] = {}
        for finished in batch:
            for tried in finished.tried:
                last[finished.check.claim.producer_group, tried.url] = tried
        changed = []
        for (group, url), result in last.items():
            known, up = self._urls.get((group, url)), result.error is None
            if known and known.up == up and now < known.written_at + timedelta(seconds=URL_REFRESH_EVERY_S):
                continue
            self._urls[group, url] = _Url(now, up)
            changed.append(CheckUrl.of(group, url, result.error, result.at))
        return changed

    def adjustments(self, batch: Sequence[FinishedCheck], now: datetime) -> list[Adjustment]:
        """Return how the windows of a batch's groups change and which are held; unchanged groups are left out.

        One for each configuration of a group. Its checks may be from before and after a registration.
        """
        by_group: defaultdict[tuple[str, datetime], list[tuple[AskedGroup, CheckResult]]] = defaultdict(list)
        for finished in batch:
            group = finished.check.group
            if group is not None and finished.result is not None:
                by_group[group.name, group.updated_at].append((group, finished.result))
        found = (self._adjustment(asked, now) for asked in by_group.values())
        return [adjustment for adjustment in found if adjustment is not None]

    def _adjustment(self, asked: list[tuple[AskedGroup, CheckResult]], now: datetime) -> Adjustment | None:
        # Only a check from after the last registration may hold the group; each counts for the window.
        group = max((one for one, _ in asked), key=_registered)
        name = group.name
        results = [result for _, result in asked]
        hold = max(held_s(result) for one, result in asked if one.registered_at == group.registered_at)
        congested = any(isinstance(one, Unanswered) and one.congested for one in results)
        until = now + timedelta(seconds=hold) if hold else None
        adjustment = Adjustment(name, group.updated_at, group.registered_at, False, 0, until)
        if congested:
            last = self._halved.get(name)
            if last is None or now >= last + timedelta(seconds=HALVE_EVERY_S):
                self._halved[name] = now
                adjustment = replace(adjustment, halve=True)
        elif group.check_window < group.check_max_in_flight and any(isinstance(one, Answered) for one in results):
            adjustment = replace(adjustment, grow=1)
        wanted = adjustment.halve or adjustment.grow or adjustment.held_until
        return adjustment if wanted else None


def _registered(group: AskedGroup) -> tuple[bool, datetime]:
    """Return a key that orders the registrations of one configuration; none comes first."""
    return group.registered_at is not None, group.registered_at or group.updated_at
