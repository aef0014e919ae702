"""Plans of every statement that the pages of the console run, over full days: no large table is read as a whole."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asyncpg.connection import LoggedQuery

from app.console.site import PAGES
from app.database.connection import connect
from app.runtime.state import Runtime
from app.store.admin.figures import DEAD
from tests.conftest import assembled, client_of, settings_of
from tests.routers.test_stats_plans import busy_days
from tests.support import postgres
from tests.support.console_forms import FORM
from tests.support.explain import BIG, scans
from tests.support.statements import recorded_queries

# `/stats` counts rows up to a limit, so it begins a scan that it does not end.
COUNTS = {DEAD}
FILTERS = (
    "",
    "?key=order-3",
    "?topic=order",
    "?state=in_doubt",
    "?state=parked",
    "?state=committed",
    "?source=policy",
    "?refused_end=true",
    "?subscription=s7",
    "?error=x",
    "?q=order",
    "?producer_group=shop",
    "?producer_group=shop&state=in_doubt",
    "?actor=dana",
    "?range=30d",
    "?sort=lag",
    "?sort=dead",
    "?sort=state",
    "?sort=undecided",
    "?sort=messages",
    "?sort=first_seen",
    "?sort=oldest",
    "?state=in_doubt&sort=oldest",
    "?producer_group=shop&state=rolled_back&reissued=false",
)


@pytest.fixture
async def service() -> AsyncIterator[tuple[Runtime, str]]:
    """A process over full days, and the URL of its database."""
    url = await asyncio.to_thread(lambda: postgres.create_database(busy_days()))
    try:
        db = await connect(url)
        await db.execute(
            "update subscription set destination = $1, start = '\"latest\"', retry = '{10}'",
            '{"type": "webhook", "url": "http://127.0.0.1:9/in"}',
        )
        await db.close()
        async with assembled(settings_of(url), url) as runtime:
            yield runtime, url
    finally:
        await asyncio.to_thread(postgres.drop_database, url)


async def test_no_page_reads_a_large_table_as_a_whole(service: tuple[Runtime, str]) -> None:
    runtime, url = service
    db = await connect(url)
    try:
        row = await db.fetchrow("select transaction_id, key from half order by transaction_id desc limit 1")
        assert row is not None
        values = {"{name}": "s7", "{transaction_id:uuid}": str(row["transaction_id"]), "{finding_id:int}": "1"}
        asked, answered = [], 0
        queries: list[LoggedQuery] = []
        async with client_of(runtime) as client:
            with recorded_queries(runtime.database, queries.append):
                for page in PAGES:
                    path = page.path
                    for name, value in values.items():
                        path = path.replace(name, value)
                    if page.method == "GET" and "sign-in" not in path and path != "/console/events":
                        path = path.replace("/producer-groups/s7", "/producer-groups/shop")
                        # Pages of one thing have no filters.
                        asked += [path + one for one in (FILTERS if "{" not in page.path else ("",))]
                for path in asked:
                    answer = await client.get(path, headers=FORM)
                    assert answer.status_code < 500, (path, answer.text)
                    answered += answer.status_code in (200, 303)
        assert answered > len(PAGES)
        read = _with_settings(queries)
        # The pages of all resources ran statements of their own.
        assert len(read) > 40
        whole = []
        for statement, (settings, arguments) in read.items():
            kinds = [kind.name for kind in (await db.prepare(statement)).get_parameters()]
            for setting in settings:
                await db.execute(setting)
            found = await scans(db, statement, kinds, arguments, generic=False)
            await db.execute("reset all")
            whole += [
                (scan, statement)
                for scan in found
                if scan.node == "Seq Scan" and scan.rows and scan.table.partition("_2")[0] in (*BIG, "dead_letter")
            ]
        assert [(scan, statement[:300]) for scan, statement in whole if statement not in COUNTS] == []
    finally:
        await db.close()


def _with_settings(queries: list[LoggedQuery]) -> dict[str, tuple[list[str], tuple[Any, ...]]]:
    """Return each statement that reads, with the settings of its database transaction and its arguments."""
    found: dict[str, tuple[list[str], tuple[Any, ...]]] = {}
    settings: list[str] = []
    for query in queries:
        text = query.query.strip().lower()
        if text.startswith(("begin", "commit", "rollback", "start")):
            settings = []
        elif text.startswith("set local"):
            settings = [one.strip().replace("set local", "set") for one in query.query.split(";")]
        elif text.startswith(("select", "with")):
            found.setdefault(query.query, (settings, query.args))
    return found
