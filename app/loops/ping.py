"""Pings: each check URL is tried every `ping_interval_s`, so that a dead one is known before its first outage."""

import asyncio
from datetime import datetime

from app.asking import ping
from app.callback_urls import without_query
from app.errors import SecretsUnreadable
from app.loops.runner import Turned
from app.runtime import Runtime
from app.sealing import GROUP_SECRETS
from app.store.check_urls import CheckUrl, all_urls, note_urls
from app.store.pings import DueGroup, take_due
from app.telemetry import withdraw

EVERY_S = 2.0
# Groups pinged together; a URL that hangs holds up these alone, and no longer than LONGEST_S.
BATCH = 50
# A step must end in time to look alive, however patient a group's checks are.
LONGEST_S = 5


class Pings:
    """The pings of one process; remembers which URLs have a gauge."""

    def __init__(self) -> None:
        self._shown: set[tuple[str, str]] = set()

    async def step(self, runtime: Runtime, now: datetime) -> Turned:
        """Ping the groups that are due, all their URLs at once, and write what came back; show how all URLs do."""
        async with runtime.database.connection() as connection:
            due = await take_due(connection, BATCH, now)
        results = await asyncio.gather(*(_ping(runtime, group, url, now) for group in due for url in group.check_urls))
        async with runtime.database.connection() as connection:
            if results:
                await note_urls(connection, results)
            self._show(runtime, await all_urls(connection))
        return Turned(len(due), more=len(due) >= BATCH)

    def _show(self, runtime: Runtime, urls: list[CheckUrl]) -> None:
        gauge = runtime.metrics.check_url_up
        # Of URLs that differ by their queries alone, the worst.
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
