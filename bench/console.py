"""The console over a full database: how long each page and each call behind it takes, and what an open overview costs.

The process has the role `api`, so that nothing is delivered meanwhile.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from statistics import median

import httpx
import psutil

from app.console.site import PAGES
from bench.console_filling import KEY, QUICK, Known, Size, configure, fill
from bench.idle import postgres_cpu_s
from bench.payload import GROUP, TOPIC
from bench.report import Report
from bench.services import Service, receiving
from bench.stage import Stage, connected, halfnote
from bench.statistic import percentile
from bench.stored import ENV, seed

ROUNDS, ROUNDS_QUICK = 40, 2
WARM_UP = 2
OPEN_S, OPEN_QUICK_S = 120, 4
# A transaction becomes parked, or is no longer, so often: each look at the state finds another one.
CHANGES_S = 1.0
LIMIT_MS = 300
OPEN_LIMIT = 1.0
_ID = "{transaction_id:uuid}"
# Pages that show nothing, and the stream, which has no end.
_OTHER = {"/console/events", "/console/find", "/console/proof/report"}
# What a filter that no row meets is asked for.
_NONE = "none-such"


@dataclass(slots=True)
class Asked:
    """A request and its times in ms."""

    path: str
    times: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def p95(self) -> float:
        """The 95th percentile."""
        return percentile(self.times, 0.95)


async def bench(stage: Stage) -> Report:
    """Fill a database, ask for every page in turn, then leave the overview open while the state changes."""
    size = QUICK if stage.quick else Size()
    report = Report(
        "console",
        f"console: {size.transactions:,} transactions, {size.subscriptions:,} subscriptions, "
        f"{size.dead_letters:,} dead letters; p95 of each page and call, ms",
    )
    dsn = await stage.database("console")
    await seed(dsn, size.transactions)
    env = {**ENV, "HALFNOTE_ROLE": "api"}
    async with receiving() as receiver, halfnote(stage, dsn, receiver, env=env) as service:
        await configure(service, size.subscriptions)
        began = time.monotonic()
        known = await fill(service, dsn, size)
        print(f"  the rest is filled in {time.monotonic() - began:.0f} s", flush=True)
        rounds = ROUNDS_QUICK if stage.quick else ROUNDS
        for what, requests in (("page", pages(known)), ("call", calls(known))):
            asked = await _ask(stage, service, requests, rounds)
            _add(report, what, asked)
        await _open(stage, report, service, dsn)
    await stage.drop("console")
    report.notes.append(f"load of the machine at the end: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} cores")
    return report


def pages(known: Known) -> dict[str, list[str]]:
    """Return requests for each page of the console by its path. Raises RuntimeError if a page has none."""
    found = {**_lists(known), **_previews(known)}
    shown = {page.path for page in PAGES if page.method == "GET" and not page.path.startswith("/console/sign-in")}
    shown -= _OTHER
    if found.keys() != shown:
        raise RuntimeError(f"without a request or without a page: {sorted(found.keys() ^ shown)}")
    return found


def _lists(known: Known) -> dict[str, list[str]]:
    now = datetime.now(UTC)
    hour, day = ((now - back).isoformat(timespec="seconds") for back in (timedelta(hours=1), timedelta(days=1)))
    subscription, _ = known.dead
    transactions = [
        {}, {"state": "in_doubt"}, {"state": "parked"}, {"state": "half"}, {"state": "committed"},
        {"state": "rolled_back"}, {"source": "policy"}, {"source": "check"}, {"source": "operator"},
        {"refused_end": "true"}, {"key": KEY}, {"key": "customer-77"}, {"key": _NONE}, {"topic": TOPIC},
        {"topic": _NONE}, {"producer_group": GROUP}, {"producer_group": _NONE}, {"born_after": hour},
        {"born_before": day}, {"state": "half", "born_before": day}, {"source": "operator", "born_before": day},
        {"format": "csv"}, {"cursor": str(known.rolled_back)}, {"sort": "oldest"},
        {"state": "in_doubt", "sort": "oldest"}, {"producer_group": _NONE, "sort": "oldest"},
        {"producer_group": GROUP, "state": "rolled_back", "reissued": "false"},
    ]  # fmt: skip
    letters = [
        {}, {"subscription": subscription}, {"topic": TOPIC}, {"topic": _NONE}, {"key": "customer-77"},
        {"reason": "rejected"}, {"error": "answered 503"}, {"error": _NONE}, {"died_after": hour},
        {"subscription": subscription, "error": _NONE},
    ]  # fmt: skip
    ids = (known.order, known.stored, known.doubted, known.rolled_back)
    return {
        "/console": [f"/console?range={name}" for name in ("1h", "24h", "7d", "30d")],
        "/console/search": _with("/console/search", [{"q": "receiver"}, {"q": "o"}, {"q": KEY}, {"q": _NONE}]),
        "/console/transactions": _with("/console/transactions", transactions),
        f"/console/transactions/{_ID}": [f"/console/transactions/{one}" for one in ids],
        "/console/subscriptions": _with(
            "/console/subscriptions",
            [{}, {"cursor": "receiver-5"}, {"format": "csv"}, *({"sort": one} for one in ("lag", "dead", "state"))],
        ),
        "/console/subscriptions/{name}": [f"/console/subscriptions/receiver-{n:03}" for n in (0, 1, 2, 24, 99, 110)],
        "/console/dead-letters": _with("/console/dead-letters", [*letters, {"format": "csv"}]),
        "/console/dead-letters/groups": _with("/console/dead-letters/groups", [*letters, {"format": "csv"}]),
        "/console/producer-groups": _with("/console/producer-groups", [{}, {"format": "csv"}, {"sort": "undecided"}]),
        "/console/producer-groups/{name}": [f"/console/producer-groups/{one}" for one in (GROUP, "shop-007")],
        "/console/topics": _with(
            "/console/topics", [{}, {"cursor": "order.5"}, {"format": "csv"}, {"sort": "messages"}]
        ),
        "/console/keys": _with("/console/keys", [{}, {"format": "csv"}, {"sort": "name"}, {"sort": "used"}]),
        "/console/audit": _with(
            "/console/audit",
            [
                *({}, {"target": "receiver-007"}, {"actor": "dana"}, {"what": _NONE}, {"after": hour}),
                *({"format": "csv"}, {"sort": "oldest"}, {"sort": "oldest", "what": _NONE}),
            ],
        ),
        "/console/proof": ["/console/proof"],
        "/console/proof/{day}": [f"/console/proof/{now.date() - timedelta(days=1)}"],
        "/console/findings": _with(
            "/console/findings", [{}, {"state": "open"}, {"kind": "parked", "state": "resolved"}, {"format": "csv"}]
        ),
        "/console/findings/{finding_id:int}": [f"/console/findings/{known.finding}"],
        "/console/workers": _with("/console/workers", [{}, {"format": "csv"}]),
    }


def _previews(known: Known) -> dict[str, list[str]]:
    """Return requests for the page of each act, which counts what the act would touch."""
    subscription, message_id = known.dead
    one = {"subscription": subscription, "message_id": message_id}
    all_of = {"producer_group": GROUP, "state": "in_doubt"}
    transaction = {"check": known.doubted, "commit": known.doubted, "rollback": known.doubted}
    transaction |= {"reissue": known.rolled_back, "replay": known.order}
    of_subscription = ("edit", "reset-breaker", "pause", "resume", "test", "replay", "rotate-secret")
    many = {f"/console/transactions/do/{act}": [all_of] for act in ("check", "commit", "rollback")}
    many["/console/transactions/do/reissue"] = [{"producer_group": GROUP, "state": "rolled_back"}]
    letters = [one, {"subscription": subscription}, {"topic": TOPIC}, {"topic": _NONE}, {"error": "answered 503"}]
    many |= {f"/console/dead-letters/do/{act}": letters for act in ("redeliver", "drop")}
    return {
        **{path: _with(path, queries) for path, queries in many.items()},
        **{
            f"/console/transactions/{_ID}/do/{act}": _with(
                f"/console/transactions/{of}/do/{act}", [{"subscription": subscription} if act == "replay" else {}]
            )
            for act, of in transaction.items()
        },
        **{
            f"/console/subscriptions/{{name}}/do/{act}": [f"/console/subscriptions/receiver-004/do/{act}"]
            for act in of_subscription
        },
        **{
            f"/console/producer-groups/{{name}}/do/{act}": [f"/console/producer-groups/{GROUP}/do/{act}"]
            for act in ("test", "rotate-secret")
        },
    }


def calls(known: Known) -> dict[str, list[str]]:
    """Return requests of the API's calls behind the pages."""
    subscription, message_id = known.dead
    series = [
        {"metric": metric, "from": (datetime.now(UTC) - timedelta(days=days)).isoformat(), "step": str(step)}
        for metric in ("halves", "in_doubt", "lag_s", "database_bytes")
        for days, step in ((1, 60), (30, 3600))
    ]
    return {
        "/stats": ["/stats"],
        "/stats/series": _with("/stats/series", series),
        "/search": _with("/search", [{"q": "receiver"}, {"q": KEY}, {"q": _NONE}, {"q": str(known.order)}]),
        "/dead-letters/groups": _with("/dead-letters/groups", [{}, {"subscription": subscription}, {"topic": _NONE}]),
        "/dead-letters": _with(
            "/dead-letters", [{}, {"subscription": subscription}, {"limit": "1000"}, {"count": "true"}]
        ),
        "/dead-letters/{subscription}/{message_id}": [f"/dead-letters/{subscription}/{message_id}"],
        "/transactions": _with(
            "/transactions",
            [{}, {"state": "in_doubt"}, {"source": "operator"}, {"key": KEY}, {"count": "true"}],
        ),
        "/transactions/{transaction_id}": [f"/transactions/{known.order}", f"/transactions/{known.doubted}"],
        "/transactions/{transaction_id}/delivery": [
            f"/transactions/{one}/delivery" for one in (known.order, known.stored, known.doubted)
        ],
        "/subscriptions": _with("/subscriptions", [{}, {"limit": "1000"}]),
        "/subscriptions/{name}": [f"/subscriptions/receiver-{n:03}" for n in (0, 1, 99)],
        "/subscriptions/{name}/recent": [f"/subscriptions/receiver-{n:03}/recent" for n in (0, 1)],
        "/producer-groups": _with("/producer-groups", [{}, {"sort": "oldest", "count": "true"}]),
        "/topics": _with("/topics", [{}, {"limit": "1000"}]),
        "/workers": ["/workers"],
        "/audit": _with("/audit", [{}, {"sort": "oldest", "count": "true"}]),
        "/api-keys": _with("/api-keys", [{}, {"sort": "used", "count": "true"}]),
        "/reconciliation": ["/reconciliation"],
        "/findings": _with("/findings", [{}, {"count": "true"}]),
    }


def _with(path: str, queries: list[dict[str, str]]) -> list[str]:
    return [str(httpx.URL(path, params=query)) for query in queries]


async def _ask(
    stage: Stage, service: Service, requests: Mapping[str, list[str]], rounds: int
) -> dict[str, list[Asked]]:
    """Send each request `rounds` times, one after another, all of them in turn. Raises RuntimeError if one fails."""
    found = {name: [Asked(path) for path in paths] for name, paths in requests.items()}
    headers = {"accept": "text/html, application/json;q=0.9"}
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=60, headers=headers) as client:
        for turn in range(rounds + WARM_UP):
            for asked in (one for many in found.values() for one in many):
                before, began = service.cpu_s() + postgres_cpu_s(stage.server), time.perf_counter()
                answer = await client.get(asked.path)
                took_s = time.perf_counter() - began
                if answer.status_code != 200:
                    raise RuntimeError(f"GET {asked.path}: {answer.status_code} {answer.text[:500]}")
                if turn >= WARM_UP:
                    asked.times.append(1000 * took_s)
                    asked.cpu_s += service.cpu_s() + postgres_cpu_s(stage.server) - before
    return found


def _add(report: Report, what: str, found: Mapping[str, list[Asked]]) -> None:
    """Add the slowest request of each page or call, and print all of them."""
    every = [one for many in found.values() for one in many]
    print(f"  {len(every)} {what}s: p50 and p95, ms; ms of CPU of service and Postgres", flush=True)
    for one in sorted(every, key=lambda one: -one.p95):
        print(f"  {median(one.times):6.0f} {one.p95:6.0f} {1000 * one.cpu_s / len(one.times):6.0f}  {one.path}")
    for name, many in found.items():
        report.add(name if what == "page" else f"GET {name}", max(one.p95 for one in many), "ms")
    slowest = max(every, key=lambda one: one.p95)
    report.notes.append(f"the slowest {what}: {slowest.path}")
    report.hold(f"p95 of the slowest {what}, ms", slowest.p95, at_most=LIMIT_MS)


async def _open(stage: Stage, report: Report, service: Service, dsn: str) -> None:
    """Compare the CPU time of the service with and without an open overview, while the state changes all the time."""
    seconds = stage.seconds(OPEN_S, OPEN_QUICK_S)
    changing = asyncio.create_task(_change(dsn))
    try:
        without = await _share(stage, service, seconds)
        loads: list[float] = []
        overview = asyncio.create_task(_overview(service, loads))
        # The first look and the first page are not what an open page costs.
        await asyncio.sleep(stage.seconds(10, 2))
        loads.clear()
        with_it = await _share(stage, service, seconds)
        if overview.done():
            overview.result()
        overview.cancel()
        with suppress(asyncio.CancelledError):
            await overview
    finally:
        changing.cancel()
        with suppress(asyncio.CancelledError):
            await changing
    service_share, postgres_share = (after - before for after, before in zip(with_it, without, strict=True))
    report.add("an open overview, service", service_share, "% of a core")
    report.add("an open overview, Postgres", postgres_share, "% of a core")
    report.notes.append(f"the open overview loaded itself {len(loads)} times in {seconds} s")
    report.hold("an open overview, service, % of a core", service_share, at_most=OPEN_LIMIT)


async def _overview(service: Service, loads: list[float]) -> None:
    """Do what the script of the page does: load it, follow its events, and load it again after each but the first."""
    html, is_first = {"accept": "text/html"}, True
    async with httpx.AsyncClient(base_url=service.url, trust_env=False, timeout=None, headers=html) as client:
        (await client.get("/console")).raise_for_status()
        async with client.stream("GET", "/console/events") as events:
            events.raise_for_status()
            async for line in events.aiter_lines():
                if not line.startswith("data: "):
                    continue
                assert "in_doubt" in json.loads(line.removeprefix("data: "))
                if not is_first:
                    (await client.get("/console")).raise_for_status()
                    loads.append(time.monotonic())
                is_first = False


async def _change(dsn: str) -> None:
    """Park a transaction in doubt and take it back, in turn."""
    async with connected(dsn) as connection:
        for state in (2, 1) * 1_000_000:
            await connection.execute(
                "update check_back set state = $1 "
                "where transaction_id = (select transaction_id from check_back order by transaction_id desc limit 1)",
                state,
            )
            await asyncio.sleep(CHANGES_S)


async def _share(stage: Stage, service: Service, seconds: int) -> tuple[float, float]:
    """Return the CPU that the service uses and that Postgres uses, in percent of a core."""
    ours, theirs, began = service.cpu_s(), postgres_cpu_s(stage.server), time.perf_counter()
    await asyncio.sleep(seconds)
    ours, theirs = service.cpu_s() - ours, postgres_cpu_s(stage.server) - theirs
    return 100 * ours / (time.perf_counter() - began), 100 * theirs / (time.perf_counter() - began)
