"""Ping each check URL every `ping_interval_s`, so that a dead URL shows before a check needs it."""

import asyncio
from datetime import datetime

from app.checkback.check_requests import ping
from app.egress.urls import without_query
from app.errors import SecretsUnreadable
from app.observability.metric_families import withdraw
from app.runtime.loop_runner import StepResult
from app.runtime.state import Runtime
from app.secrets.vault import GROUP_SECRETS
from app.store.checkback.check_urls import CheckUrl, all_urls, note_urls
from app.store.checkback.pings import DueGroup, take_due

EVERY_S = 2.0
# Groups that are pinged together; a URL that hangs delays only these, by LONGEST_S at most.
BATCH = 50
# A step must end before the loop counts as late, even if a group's `check_timeout_s` is long.
LONGEST_S = 5


class Pings:
    """The pings of one process, and the URLs that have a gauge."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str]] = set()

    async def step(self, runtime: Runtime, now: datetime) -> StepResult:
        """Ping the groups that are due, all their URLs at once; write the results and show the state of all URLs."""
        async with runtime.database.connection() as connection:
            due = await take_due(connection, BATCH, now)
        results = await asyncio.gather(*(_ping(runtime, group, url, now) for group in due for url in group.check_urls))
        async with runtime.database.connection() as connection:
            if results:
                await note_urls(connection, results)
            self._show(runtime, await all_urls(connection))
        return StepResult(len(due), more=len(due) >= BATCH)

    def _show(self, runtime: Runtime, urls: list[CheckUrl]) -> None:
        gauge = runtime.metrics.checkback.check_url_up
        # URLs that differ only in their queries share a gauge, which shows the worst of them.
        up: dict[tuple[str, str], bool] = {}
        for url in urls:
            known = url.producer_group, without_query(url.url)
            up[known] = up.get(known, True) and url.up
        for gone in self._shown - up.keys():
            withdraw(gauge, *gone)
        for known, value in up.items():
            gauge.labels(*known).set(value)
        self._shown = set(up)


async def _ping(runtime: Runtime, group: DueGroup, url: str, now: datetime) -> CheckUrl:
    try:
        secrets = runtime.vault.secrets(GROUP_SECRETS, group.name, group.secrets)
    except SecretsUnreadable as error:
        return CheckUrl.of(group.name, url, error.detail, now)
    timeout_s = min(group.check_timeout_s, LONGEST_S)
    result = await ping(runtime.checks_http, group.name, url, secrets, timeout_s=timeout_s, now=now)
    return CheckUrl.of(group.name, url, result.error, now)
